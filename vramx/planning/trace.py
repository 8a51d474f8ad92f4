"""One step of the whole model, watched at the borders of its blocks.

Hooks on the blocks and on the tensors between them note what is allocated as each call begins and
ends, forward and backward, and the peak since the last such note. The first step also keeps, for
each kind of call, what it was given: its arguments, on which isolated.py runs it alone. Hooks are
gone when the step is over, and no tensor of its graph is held. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from vramx.errors import InvalidValueError
from vramx.planning.blocks import Block
from vramx.planning.caches import check_has_none
from vramx.planning.meters import Meter
from vramx.planning.steps import Step
from vramx.recompute.attributes import Attributes
from vramx.recompute.structure import Structure, flatten, leaves_of


class Event(Enum):
    """What a mark is of; a call is given for all but the step's own."""

    STEP = "the step begins or ends"
    FORWARD_BEGIN = "forward begins"
    FORWARD_END = "forward ends"
    BACKWARD_BEGIN = "backward begins"
    BACKWARD_END = "backward ends"


@dataclass(frozen=True)
class Mark:
    """What is allocated at an event, and the peak from there to the next."""

    event: Event
    call: int
    level: int
    peak: int = 0


@dataclass
class Call:
    """One call of a block as a step made it.

    Attributes:
        block: the block's number; kind: what calls that cost the same have in common.
        input_bytes, output_bytes: of the first tensor of each that has a gradient.
        linked: its input is the output of the call before.
        input_stays, output_stays: whether they were there still when forward had ended.
        input_is_late, output_is_late: whether they were when the call's backward began.
    """

    block: int
    kind: Hashable
    input_bytes: int = 0
    output_bytes: int = 0
    linked: bool = False
    input_stays: bool = False
    output_stays: bool = False
    input_is_late: bool = False
    output_is_late: bool = False


@dataclass
class Captured:
    """A call to be made again: the arguments, those with a gradient as copies without one.

    And what the block's modules had in their attributes: some hand on from one call to the next.
    """

    block: Block
    arguments: list[Any]
    structure: Structure
    moving: tuple[int, ...]  # positions of the arguments with a gradient
    autocast: torch.dtype | None
    attributes: Attributes

    def call(self, moving: Sequence[Tensor]) -> Any:
        """Call the block, with these for the arguments that have a gradient."""
        arguments = list(self.arguments)
        for position, tensor in zip(self.moving, moving, strict=True):
            arguments[position] = tensor
        args, kwargs = self.structure.rebuild(arguments)
        module = self.block.module
        device = next(module.parameters()).device
        autocast = torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)
        with self.attributes.restored(), autocast:
            _drop_graphs(module)
            return module(*args, **kwargs)


@dataclass
class Trace:
    """What a step did: its calls in order, its marks, and the calls to make again by kind."""

    calls: list[Call] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    captured: dict[Hashable, Captured] = field(default_factory=dict)


def trace_step(step: Step, blocks: Sequence[Block], meter: Meter, *, capture: bool) -> Trace:
    """Run a step and return its trace; arguments of calls are kept where `capture` says so.

    Raises:
        InvalidValueError: no block was called, or one is checkpointed or given a cache.
    """
    tracer = _Tracer(blocks, meter, capture=capture)
    with tracer.hooks():
        tracer.mark(Event.STEP)
        step(tracer.end_of_forward)
        tracer.mark(Event.STEP)
    if not tracer.trace.calls:
        raise InvalidValueError("the sample's step calls none of the model's blocks")
    return tracer.trace


def moving_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree that take part in backward."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


class _Tracer:
    def __init__(self, blocks: Sequence[Block], meter: Meter, *, capture: bool) -> None:
        self.trace = Trace()
        self._blocks = blocks
        # Now: what a module says of itself may have a count of its calls in it.
        self._texts = [repr(block.module) for block in blocks]
        self._meter = meter
        self._captures = capture
        self._in_forward = True
        self._borders: list[list[weakref.ref[Any] | None]] = []  # storages: input and output
        self._begun: set[int] = set()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for number, block in enumerate(self._blocks):
                for handle in self._hook(number, block.module):
                    stack.callback(handle.remove)
            yield

    def _hook(self, number: int, module: nn.Module) -> Iterator[Any]:
        entered: list[int] = []

        def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self._in_forward:
                entered.append(self._begin(number, args, kwargs))

        def end(_: nn.Module, _args: Any, result: Any) -> None:
            if self._in_forward:
                self._end(entered.pop(), result)

        yield module.register_forward_pre_hook(begin, with_kwargs=True)
        yield module.register_forward_hook(end)

    def mark(self, event: Event, call: int = -1) -> None:
        marks, meter = self.trace.marks, self._meter
        if marks:
            last = marks[-1]
            marks[-1] = Mark(last.event, last.call, last.level, meter.peak_bytes())
        marks.append(Mark(event, call, meter.allocated_bytes(), meter.allocated_bytes()))
        meter.reset_peak()

    def end_of_forward(self) -> None:
        """Note which of the tensors between blocks something holds."""
        self._in_forward = False
        for i, call in enumerate(self.trace.calls):
            call.input_stays, call.output_stays = self._borders_there(i)

    def _borders_there(self, index: int) -> tuple[bool, bool]:
        source, result = (ref is not None and ref() is not None for ref in self._borders[index])
        return source, result

    def _begin(self, number: int, args: Any, kwargs: dict[str, Any]) -> int:
        block = self._blocks[number]
        _check(block, kwargs)
        leaves, structure = flatten((args, kwargs))
        moving = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        moving = [i for i in moving if not isinstance(leaves[i], nn.Parameter)]
        autocast = _autocast_dtype(block.module)
        kind = (self._texts[number], *_kind(block, leaves, str(structure), autocast))
        if self._captures and kind not in self.trace.captured:
            kept = [x.detach().clone() if i in moving else x for i, x in enumerate(leaves)]
            held = Attributes(block.module.modules())
            self.trace.captured[kind] = Captured(
                block, kept, structure, tuple(moving), autocast, held
            )
        call, index = Call(number, kind), len(self.trace.calls)
        source = leaves[moving[0]].untyped_storage() if moving else None
        if source is not None:
            call.input_bytes = source.nbytes()
            before = self._borders[-1][1] if self._borders else None
            call.linked = before is not None and before() is source
        self.trace.calls.append(call)
        self._borders.append([None if source is None else weakref.ref(source), None])
        left = [len(moving)]
        for position in moving:
            leaves[position].register_hook(self._backward_ends(index, left))
        self.mark(Event.FORWARD_BEGIN, index)
        return index

    def _end(self, index: int, result: Any) -> None:
        outputs = moving_tensors(result)
        if outputs:
            storage = outputs[0].untyped_storage()
            self.trace.calls[index].output_bytes = storage.nbytes()
            self._borders[index][1] = weakref.ref(storage)
        for tensor in outputs:
            tensor.register_hook(self._backward_begins(index))
        self.mark(Event.FORWARD_END, index)

    def _backward_begins(self, index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if index not in self._begun:
                self._begun.add(index)
                call = self.trace.calls[index]
                call.input_is_late, call.output_is_late = self._borders_there(index)
                self.mark(Event.BACKWARD_BEGIN, index)

        return hook

    def _backward_ends(self, index: int, left: list[int]) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                self.mark(Event.BACKWARD_END, index)

        return hook


def _kind(
    block: Block, leaves: Sequence[Any], structure: str, autocast: Any
) -> tuple[Hashable, ...]:
    module = block.module
    parameters = [(tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()]
    given = [
        (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else type(x)
        for x in leaves
    ]
    flags = [part.training for part in module.modules()]
    described = (structure, autocast, block.known)
    return (type(module), *described, *parameters, *given, *flags)


def _drop_graphs(module: nn.Module) -> None:
    """Have no graph to what a module's parts hold: its step is over, and backward has freed it."""
    for part in module.modules():
        for own in (vars(part), part._buffers):
            own |= {
                name: value.detach()
                for name, value in own.items()
                if isinstance(value, Tensor) and value.grad_fn is not None
            }


def _autocast_dtype(module: nn.Module) -> torch.dtype | None:
    device = next(module.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _check(block: Block, kwargs: dict[str, Any]) -> None:
    if getattr(block.module, "gradient_checkpointing", False):
        raise InvalidValueError(
            f"{block.name} is checkpointed by its library; call "
            "model.gradient_checkpointing_disable(): a plan decides what is recomputed"
        )
    check_has_none(block.name, kwargs)
