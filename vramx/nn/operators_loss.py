"""The operators of linear_cross_entropy: chunks of tokens, their logits, and the sums of gradients.

Two, for what is differentiated in forward (mean, sum) and in backward (a loss each token). Both use
one buffer of a chunk's logits, over which the kernel writes their gradient. Arguments are checked
by loss.py. No state; any thread; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vramx.errors import FirstDerivativeOnlyError
from vramx.kernels import cross_entropy_launch as launch
from vramx.nn import keeping
from vramx.nn import reference_elementwise as reference
from vramx.nn.operators import operator

# The gradient of weight is read and written once a chunk: 4 bytes a weight beside 6 operations a
# weight and token. At 2048 tokens that is 6 % of the time of an H200's products, at 512 a quarter.
_TOKENS_OF_CHUNK = 2048
_LOGITS_BYTES = 512 << 20
_TOKENS_MULTIPLE = 128  # of the products' tiles
_ACCESS_BYTES = 16


@dataclass(frozen=True)
class _Options:
    """What an operator's list of floats says: a schema has no other room for it."""

    ignored: int
    smoothing: float
    cap: float | None
    chunk: int

    @classmethod
    def of(cls, settings: Sequence[float]) -> _Options:
        ignored, smoothing, cap, chunk = settings
        return cls(int(ignored), smoothing, cap or None, int(chunk))

    @property
    def of_kernel(self) -> launch.LossOptions:
        return launch.LossOptions(self.ignored, self.smoothing, self.cap)


def chunk_tokens(rows: Tensor, weight: Tensor, chunk: int) -> int:
    """Return the tokens of a chunk: what was asked for, or for 0 chunks of about equal size."""
    if chunk:
        return chunk
    most = min(_TOKENS_OF_CHUNK, _LOGITS_BYTES // max(1, weight.shape[0] * rows.element_size()))
    chunks = -(-rows.shape[0] // max(most, _TOKENS_MULTIPLE))
    even = -(-rows.shape[0] // max(1, chunks))
    return max(1, -(-even // _TOKENS_MULTIPLE)) * _TOKENS_MULTIPLE


class _Chunk(NamedTuple):
    """Some tokens, and memory that the next chunk has too."""

    part: slice
    logits: Tensor
    mail: Tensor | None


def _chunks(
    rows: Tensor, weight: Tensor, bias: Tensor | None, options: _Options
) -> Iterator[_Chunk]:
    """Yield each chunk with its logits."""
    tokens = min(chunk_tokens(rows, weight, options.chunk), rows.shape[0])
    buffer = _empty_logits(rows, tokens, weight.shape[0])
    mail = launch.new_mail(buffer, options.of_kernel) if _is_served(buffer) else None
    for start in range(0, rows.shape[0], max(1, tokens)):
        part = slice(start, min(start + tokens, rows.shape[0]))
        logits = buffer[: part.stop - start]
        if bias is None:
            torch.mm(rows[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, rows[part], weight.t(), out=logits)
        yield _Chunk(part, logits, mail)


def _empty_logits(rows: Tensor, tokens: int, classes: int) -> Tensor:
    """Return memory for logits whose rows begin at multiples of 16 bytes.

    From elsewhere matrix products would read and write some bytes at a time. What is behind the
    rows is zero: oneDNN's products in bfloat16 on processors with AMX multiply it by zero and add
    the result, which is NaN where the memory held a NaN (torch 2.13).
    """
    multiple = _ACCESS_BYTES // rows.element_size()
    memory = rows.new_empty(tokens, -(-classes // multiple) * multiple)
    memory[:, classes:].zero_()
    return memory[:, :classes]


def _is_served(logits: Tensor) -> bool:
    return keeping.served(logits) and launch.fits(logits)


def _evaluate(
    chunk: _Chunk, targets: Tensor, losses: Tensor, options: _Options, gradient: Tensor | bool
) -> None:
    """Write the losses, and over the logits their gradients, weighted if `gradient` is a tensor.

    Targets and losses are of all tokens, the weights of the chunk's.
    """
    logits, targets, losses = chunk.logits, targets[chunk.part], losses[chunk.part]
    if _is_served(logits):
        rows = launch.LossRows(targets, losses, chunk.mail)
        launch.cross_entropy(logits, rows, options.of_kernel, gradient)
        return
    values, change = reference.cross_entropy(
        logits, targets, options.ignored, options.smoothing, options.cap
    )
    losses.copy_(values)
    if gradient is not False:
        logits.copy_(change * gradient[:, None] if isinstance(gradient, Tensor) else change)


class _Gradients:
    """The sums over chunks of the gradients that are needed; empty tensors for the others."""

    def __init__(self, rows: Tensor, weight: Tensor, needs: Sequence[bool]) -> None:
        self._needs = needs
        self._rows, self._weight = rows, weight
        sums = torch.float32 if weight.dtype == torch.float16 else weight.dtype
        self.hidden = rows.new_empty(rows.shape if needs[0] else 0)
        shape = weight.shape if needs[1] else (0,)
        self.weight = torch.zeros(shape, dtype=sums, device=rows.device)
        size = weight.shape[0] if needs[2] else 0
        self.bias = torch.zeros(size, dtype=reference.wide(rows[:0]).dtype, device=rows.device)

    def add(self, part: slice, change: Tensor) -> None:
        """Add what the gradient of a chunk's logits gives."""
        if self._needs[0]:
            torch.mm(change, self._weight, out=self.hidden[part])
        if self._needs[1]:
            rows = self._rows[part]
            if self.weight.dtype == rows.dtype:
                self.weight.addmm_(change.t(), rows)
            else:
                self.weight.add_(change.t() @ rows)
        if self._needs[2]:
            self.bias += change.sum(0, dtype=self.bias.dtype)


# -- Mean and sum: differentiated in forward -------------------------------------------------------


@operator(
    "vramx::linear_cross_entropy",
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, float[] "
    "settings, bool[] needs, bool mean) -> (Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
)
def loss_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: Sequence[float],
    needs: Sequence[bool], mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the loss, the gradients of the sum, and the factor that makes them the loss's."""
    options = _Options.of(settings)
    targets = targets.contiguous()
    gradients = _Gradients(hidden, weight, needs)
    losses = _empty_losses(hidden)
    for chunk in _chunks(hidden, weight, bias, options):
        _evaluate(chunk, targets, losses, options, any(needs))
        gradients.add(chunk.part, chunk.logits)
    if not mean:
        factor = losses.new_ones(())
        return losses.sum(), factor, gradients.hidden, gradients.weight, gradients.bias
    count = (targets != options.ignored).sum().to(losses.dtype)
    # Where nothing counts the loss is NaN, but no gradient is: 0 and not 0 / 0.
    factor = 1 / count.clamp(min=1)
    return losses.sum() / count, factor, gradients.hidden, gradients.weight, gradients.bias


def _empty_losses(hidden: Tensor) -> Tensor:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)


@loss_and_gradients.register_fake
def _(
    hidden: Tensor, weight: Tensor, _bias: Tensor | None, _targets: Tensor,
    _settings: Sequence[float], needs: Sequence[bool], _mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _Gradients(hidden, weight, needs)
    scalar = _empty_losses(hidden).new_empty(())
    other = scalar.new_empty(())
    return scalar, other, gradients.hidden, gradients.weight, gradients.bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.needs = inputs[5]
    # Of its inputs only the types: they are not referred to.
    ctx.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in inputs[:3])
    # As bytes: an enclosing compression must not take gradients for activations.
    factor, *sums = output[1:]
    ctx.of_sums = tuple(each.dtype for each in sums)
    ctx.save_for_backward(factor, *(each.view(torch.uint8) for each in sums))


def _differentiate(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 7
    _refuse_double_backward()
    factor, *sums = ctx.saved_tensors
    scale = gradient * factor
    found = [
        (each.view(of_sum) * scale).to(dtype) if needed else None
        for each, of_sum, dtype, needed in zip(
            sums, ctx.of_sums, ctx.dtypes, ctx.needs, strict=True
        )
    ]
    return *found, None, None, None, None


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise FirstDerivativeOnlyError(
            "linear_cross_entropy has no second derivative; with create_graph=True use "
            "torch.nn.functional.linear and cross_entropy"
        )


loss_and_gradients.register_autograd(_differentiate, setup_context=_save)


# -- A loss each token: differentiated in backward -------------------------------------------------


@operator(
    "vramx::linear_cross_entropy_losses",
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, float[] "
    "settings) -> Tensor",
)
def losses_of_tokens(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: Sequence[float]
) -> Tensor:
    options = _Options.of(settings)
    targets = targets.contiguous()
    losses = _empty_losses(hidden)
    for chunk in _chunks(hidden, weight, bias, options):
        _evaluate(chunk, targets, losses, options, False)
    return losses


@losses_of_tokens.register_fake
def _(
    hidden: Tensor,
    _weight: Tensor,
    _bias: Tensor | None,
    _targets: Tensor,
    _settings: Sequence[float],
) -> Tensor:
    return _empty_losses(hidden)


@operator(
    "vramx::linear_cross_entropy_losses_backward",
    schema="(Tensor gradient, Tensor hidden, Tensor weight, Tensor? bias, Tensor "
    "targets, float[] settings, bool[] needs) -> (Tensor, Tensor, Tensor)",
)
def _losses_backward(
    gradient: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
    settings: Sequence[float], needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = _Options.of(settings)
    targets, gradient = targets.contiguous(), gradient.contiguous()
    gradients = _Gradients(hidden, weight, needs)
    losses = _empty_losses(hidden)
    for chunk in _chunks(hidden, weight, bias, options):
        _evaluate(chunk, targets, losses, options, gradient[chunk.part])
        gradients.add(chunk.part, chunk.logits)
    return gradients.hidden, gradients.weight, gradients.bias


@_losses_backward.register_fake
def _(
    _gradient: Tensor, hidden: Tensor, weight: Tensor, _bias: Tensor | None, _targets: Tensor,
    _settings: Sequence[float], needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _Gradients(hidden, weight, needs)
    return gradients.hidden, gradients.weight, gradients.bias


def _save_losses(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    hidden, weight, bias, targets, ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets)


def _differentiate_losses(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 5
    _refuse_double_backward()
    tensors = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    sums = _losses_backward(gradient, *tensors, ctx.settings, needs)
    found = [
        each.to(tensor.dtype) if needed else None
        for each, tensor, needed in zip(sums, tensors[:3], needs, strict=True)
    ]
    return *found, None, None


losses_of_tokens.register_autograd(_differentiate_losses, setup_context=_save_losses)
