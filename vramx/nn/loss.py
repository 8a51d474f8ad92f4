"""A Linear and its cross entropy that never hold the logits.

Tokens go through in chunks: their logits are made in one buffer, a kernel takes the loss of each
row and writes the gradient over it, and two products turn that into a part of the gradients of
hidden and weight. So "mean" and "sum" are differentiated in forward, once and for a loss of weight
one, and backward multiplies by the gradient that comes in. With "none" every token has a gradient
of its own, which only backward knows: it makes the logits again.
The products are the three of a plain Linear; "none" has one more.
No state; any thread; nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vramx.errors import InvalidValueError, refused
from vramx.nn import arguments
from vramx.nn import operators_loss as operators

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the cross entropy of hidden weight^T + bias without holding these logits.

    Args:
        hidden: (..., inputs), floating.
        weight: (classes, inputs).
        targets: int64, hidden's shape without its last size: classes, or `ignore_index`.
        bias: (classes,) or None.
        ignore_index: tokens with this target count for nothing, in the mean neither.
        reduction: "mean" over the tokens that count, "sum", or "none": float32 losses.
        label_smoothing: 0 to 1, as torch's cross_entropy has it.
        logit_softcap: c makes logits l into c tanh(l / c); None leaves them.
        chunk: tokens at a time; None is 2048, or what has 512 MiB of logits.

    Returns:
        float32 (float64 for float64): a scalar, or with "none" targets' shape. As with torch, NaN
        where "mean" has no token that counts; also where a target is no class, for a device cannot
        raise without waiting.

    Raises:
        InvalidValueError: an argument is not accepted.
        FirstDerivativeOnlyError: in backward with create_graph=True.

    Memory: keeps the gradients of hidden and of weight, in their types; with "none" it refers to
        the inputs. Temporary: one chunk's logits; in backward the scaled gradients.
    Sync: none.
    Error bound: logits and their gradient are rounded to hidden's type once each, as they are
        without chunks. A gradient of weight in bfloat16 is rounded once a chunk, which for n chunks
        of like size adds sqrt(n / 3) roundings' error; in float16 it is summed in float32.
    Source: gradients in forward and chunks over tokens are Liger Kernel's (Hsu et al., 2024).

    Example:
        >>> hidden, weight = torch.zeros(5, 8), torch.zeros(4, 8)
        >>> linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 3, -100]))
        tensor(1.3863)
    """
    _check(hidden, weight, targets, bias)
    _check_options(ignore_index, reduction, label_smoothing, logit_softcap, chunk)
    bias, (hidden, weight) = arguments.cast_for_linear(bias, hidden, weight)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    settings = [float(ignore_index), label_smoothing, logit_softcap or 0.0, float(chunk or 0)]
    if reduction == "none":
        losses: Tensor = operators.losses_of_tokens(rows, weight, bias, flat, settings)
        return losses.view(targets.shape)
    tensors = (rows, weight, bias)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    loss: Tensor = operators.loss_and_gradients(
        rows, weight, bias, flat, settings, needs, reduction == "mean"
    )[0]
    return loss


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    arguments.check_floats(hidden=hidden, weight=weight, bias=bias)
    arguments.check_linear(hidden.shape, weight, bias)
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:-1]:
        raise InvalidValueError(
            f"targets is a tensor of {targets.dtype} and shape {tuple(targets.shape)}; accepted is "
            f"int64 of shape {tuple(hidden.shape[:-1])}"
        )


def _check_options(
    ignore_index: int, reduction: str, smoothing: float, cap: float | None, chunk: int | None
) -> None:
    if reduction not in REDUCTIONS:
        words = "'mean', 'sum' and 'none'"
        raise refused("reduction", reduction, f"are {words}")
    if abs(ignore_index) > 1 << 53:
        raise InvalidValueError(f"ignore_index {ignore_index} is not accepted; below 2**53 is")
    if not 0 <= smoothing <= 1:
        raise InvalidValueError(f"label_smoothing {smoothing} is not accepted; 0 to 1 is")
    if cap is not None and not 0 < cap < float("inf"):
        raise InvalidValueError(f"logit_softcap {cap} is not accepted; above 0 and None are")
    if chunk is not None and chunk < 1:
        raise InvalidValueError(f"chunk {chunk} is not accepted; at least 1 and None are")
