"""Activations, gated units, dropout and cross entropy in plain torch.

The oracle of the kernels, the path of CPUs and float64, and the formulas of double backward: those
of the first part are compositions that autograd differentiates, the others its explicit first
derivatives. Everything is computed in float32, in float64 for float64. Pure and thread-safe; each
function takes some temporary tensors of its input's size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.codec.reference import noise_halves
from vramx.nn.reference_norm import wide as wide

KINDS = ("silu", "gelu", "gelu_tanh")


# -- Compositions that can be differentiated as often as one likes ---------------------------------


def activation(x: Tensor, kind: str) -> Tensor:
    """Return act(x) in x's type."""
    return _act(wide(x), kind).to(x.dtype)


def glu(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Return act(gate) * up in gate's type."""
    return (_act(wide(gate), kind) * wide(up)).to(gate.dtype)


def _act(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


# -- First derivatives -----------------------------------------------------------------------------


def activation_backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """Return dy * act'(x); both are `wide`, and so is the result."""
    if kind == "silu":
        dx: Tensor = torch.ops.aten.silu_backward(dy, x)
    else:
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        dx = torch.ops.aten.gelu_backward(dy, x, approximate=approximate)
    return dx


def glu_backward(dz: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return dgate, dup and z; all are `wide`."""
    value = _act(gate, kind)
    return activation_backward(dz * up, gate, kind), dz * value, value * up


def dropout(x: Tensor, residual: Tensor | None, key: Tensor, kept: int) -> Tensor:
    """Return x * 65536 / kept where 16 bits of an element's noise are below `kept`, plus residual.

    The noise is reference.noise_halves of the key, stream 0: what the kernel draws.
    """
    numel = x.numel()
    halves = noise_halves(-(-numel // 8) * 8, key, 0)[:numel].view(x.shape)
    scaled = wide(x) * (65536.0 / kept if kept else 0.0)
    y = torch.where(halves < kept, scaled, 0.0)
    return (y if residual is None else y + wide(residual)).to(x.dtype)


def cross_entropy(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the losses of rows of logits, and the gradient of each with respect to its logits.

    An ignored row has loss 0 and gradient 0; a target that is no class gives NaN. Both are `wide`.
    """
    raw = wide(logits)
    x = raw if cap is None else cap * torch.tanh(raw / cap)
    classes = x.shape[1]
    wrong = (targets < 0) | (targets >= classes)
    index = torch.where(wrong, 0, targets)[:, None]
    log_sum = torch.logsumexp(x, 1)
    chosen = x.gather(1, index)[:, 0]
    losses = log_sum - (1 - smoothing) * chosen
    if smoothing:  # 0 times the sum is NaN where a logit is infinite
        losses -= smoothing / classes * x.sum(1)
    gradient = torch.exp(x - log_sum[:, None]) - smoothing / classes
    gradient.scatter_add_(1, index, torch.full_like(index, smoothing - 1, dtype=x.dtype))
    if cap is not None:
        gradient *= 1 - (x / cap) ** 2
    skipped = targets == ignored
    losses = torch.where(wrong, torch.nan, losses).masked_fill(skipped, 0)
    gradient = torch.where(wrong[:, None], torch.nan, gradient)
    return losses, gradient.masked_fill_(skipped[:, None], 0)
