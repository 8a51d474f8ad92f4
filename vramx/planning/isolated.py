"""One block by itself: what it keeps, its peaks and its time, under the word that it has.

The block runs between two functions of autograd, which stand for its neighbours: one makes its
input, fresh memory that nobody else holds, the other the gradient of its output. So the moments of
the measured levels are those of a whole step. A run out of memory is an answer: None. Not
thread-safe; takes some forty passes of a block.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vramx.errors import InvalidValueError
from vramx.planning.device_memory import is_out_of_memory
from vramx.planning.meters import Busy, HostMeter, Meter
from vramx.planning.timeline import Cost
from vramx.planning.trace import Captured, moving_tensors

_CALLS = 3
# What torch says of a graph that another backward pass has been through.
_GRAPH_IS_GONE = "backward through the graph a second time"
# Counts nothing while it does not watch: asking a GPU's allocator takes longer than a small kernel.
_NO_METER = HostMeter(nn.Module())
Begin = Callable[[Iterable[nn.Parameter]], None]


class _Levels:
    """What a backward pass had allocated, noted by its two ends."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.start_bytes = self.peak_bytes = 0

    def begin(self) -> None:
        self._meter.reset_peak()
        self.start_bytes = self._meter.allocated_bytes()

    def end(self) -> None:
        self.peak_bytes = self._meter.peak_bytes()


class _Source(torch.autograd.Function):
    """Gives the first tensor as new memory and the others as they are; its backward is the end."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, levels: _Levels, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.levels, ctx.count = levels, len(tensors)
        return tensors[0].clone(), *(tensor.view_as(tensor) for tensor in tensors[1:])

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        ctx.levels.end()
        return None, None, *[None] * ctx.count


class _Sink(torch.autograd.Function):
    """Turns outputs into a scalar; its backward makes their gradients, and is the beginning."""

    @staticmethod
    def forward(ctx: Any, levels: _Levels, *outputs: Tensor) -> Tensor:
        ctx.levels = levels
        ctx.described = [(x.shape, x.dtype, x.device) for x in outputs]
        return outputs[0].new_zeros((), dtype=torch.float32)  # of complex ones no gradient begins

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        # Random as in training: what is multiplied by zeros draws less power, and runs faster.
        made = [torch.randn(s, dtype=t, device=d) for s, t, d in ctx.described]
        ctx.levels.begin()
        return None, *made


def busy_without_block(captured: Captured, meter: Meter, begin: Begin) -> Busy:
    """Return what the functions beside a call take with no block between them."""

    def run() -> None:
        begin(captured.block.module.parameters())
        _run(captured, _NO_METER, tuple)

    run()
    return meter.busy(run, _CALLS)


def measure_block(captured: Captured, meter: Meter, beside: Busy, begin: Begin) -> Cost | None:
    """Return what a call costs as its block is now; None: the device has not enough memory.

    `beside` is taken off its times: the same for each word, so that they compare as measured.
    `begin` does before a run with the block's gradients what the loop does before a step.
    """

    def run(meter: Meter) -> Cost:
        begin(captured.block.module.parameters())
        return _run(captured, meter)

    try:
        with meter.watching():
            run(meter)  # what is compiled or set up once is no cost of a step
            meter.settle()
            cost: Cost | None = run(meter)
        busy = meter.busy(lambda: run(_NO_METER), _CALLS)
    except RuntimeError as error:
        if _GRAPH_IS_GONE in str(error):
            block = captured.block
            raise InvalidValueError(
                f"{block.name}, a {type(block.module).__name__}, is given something that holds the "
                "graph of what came before it, as a function over results, and cannot be measured "
                "alone: call it with these as tensors, or wrap its calls by hand"
            ) from error
        if not is_out_of_memory(error):
            raise
        cost = None
    if cost is None:
        free_garbage()
        return None
    host_ms, device_ms = (max(0.0, a - b) for a, b in zip(busy, beside, strict=True))
    return replace(cost, host_ms=host_ms, device_ms=device_ms)


def free_garbage() -> None:
    """Free what the traceback of an error held, after the error was dealt with."""
    gc.collect()
    torch.cuda.empty_cache()


def _run(
    captured: Captured, meter: Meter, call: Callable[[Sequence[Tensor]], Any] | None = None
) -> Cost:
    """Run forward and backward once, of the block or of `call`; return the cost but for times."""
    levels = _Levels(meter)
    empty = meter.allocated_bytes()
    moving = [captured.arguments[position] for position in captured.moving]
    if moving:
        anchor = torch.zeros((), device=moving[0].device, requires_grad=True)
        inputs: Any = _Source.apply(anchor, levels, *moving)
        input_bytes = inputs[0].untyped_storage().nbytes()
        del moving, anchor
    else:
        inputs, input_bytes = (), 0
    start = meter.allocated_bytes()
    meter.reset_peak()
    outputs = moving_tensors((call or captured.call)(inputs))
    forward_bytes = meter.peak_bytes() - start
    if not outputs:
        return Cost(0, False, False, forward_bytes, 0, 0.0, 0.0)
    output_bytes = outputs[0].untyped_storage().nbytes()
    meter.settle()
    with_both = meter.allocated_bytes()
    del inputs
    without_input = meter.allocated_bytes()
    root = _Sink.apply(levels, *outputs)
    del outputs
    kept = meter.allocated_bytes()
    holds_input = input_bytes > 0 and with_both - without_input < input_bytes / 2
    holds_output = without_input - kept < output_bytes / 2
    root.backward()
    if not levels.peak_bytes:
        levels.end()  # the input has no gradient
    borders = holds_input * input_bytes + holds_output * output_bytes
    return Cost(
        kept_bytes=max(0, kept - empty - borders),
        holds_input=holds_input,
        holds_output=holds_output,
        forward_bytes=forward_bytes,
        backward_bytes=max(0, levels.peak_bytes - levels.start_bytes),
        host_ms=0.0,
        device_ms=0.0,
    )
