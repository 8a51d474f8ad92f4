"""The operators of linear_cross_entropy: what autograd and the compiler see of it.

Two, for what is differentiated in forward (mean, sum) and in backward (a loss each token). Both go
through tokens in chunks, which are loss_chunks.py's. Arguments are checked by loss.py. No state;
any thread; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.errors import FirstDerivativeOnlyError
from vramx.nn.loss_chunks import Gradients, Options, chunks_of, evaluate
from vramx.nn.operators import operator

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
    options = Options.of(settings)
    targets = targets.contiguous()
    gradients = Gradients(hidden, weight, needs)
    losses = _empty_losses(hidden)
    for chunk in chunks_of(hidden, weight, bias, options):
        evaluate(chunk, targets, losses, options, any(needs))
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
    gradients = Gradients(hidden, weight, needs)
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
            "torch.nn.functional.linear and cross_entropy, or leave the head of a model as it is: "
            "vramx.optimize(model, {'lm_head': 'left', '*': level})"
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
    options = Options.of(settings)
    targets = targets.contiguous()
    losses = _empty_losses(hidden)
    for chunk in chunks_of(hidden, weight, bias, options):
        evaluate(chunk, targets, losses, options, False)
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
    options = Options.of(settings)
    targets, gradient = targets.contiguous(), gradient.contiguous()
    gradients = Gradients(hidden, weight, needs)
    losses = _empty_losses(hidden)
    for chunk in chunks_of(hidden, weight, bias, options):
        evaluate(chunk, targets, losses, options, gradient[chunk.part])
        gradients.add(chunk.part, chunk.logits)
    return gradients.hidden, gradients.weight, gradients.bias


@_losses_backward.register_fake
def _(
    _gradient: Tensor, hidden: Tensor, weight: Tensor, _bias: Tensor | None, _targets: Tensor,
    _settings: Sequence[float], needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = Gradients(hidden, weight, needs)
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
