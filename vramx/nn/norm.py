"""RMSNorm and LayerNorm that keep one packed tensor, as functions and as modules.

What is kept for backward is the normalised input (before weight and bias) and one float a row. The
Linears that follow take the same buffer (linear.py), so that neither the norm's input nor its
output is kept by anybody; the sum with a residual is computed in the same pass. Here arguments are
checked and types chosen; the work is in operators_norm.py. No state; any thread. A call is one
kernel, and some tens of microseconds of host time (operators.py).

Memory, kept: 1.047 bytes an element at 8 bits in groups of 128, and 4 bytes a row.
Error bound: y and the sum as torch's own. Gradients: the normalised input is off by at most one
step of its group (vramx/compression/codec/codec.py), unbiased if rounding is stochastic; those of
weight and bias, where bfloat16, are sums of a few hundred parts that were rounded to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vramx.compression.config import Compression
from vramx.nn import arguments
from vramx.nn import operators_norm as _operators
from vramx.nn.dropout import ALL_KEPT, dropout, dropout_add, levels_kept, new_key
from vramx.nn.keeping import Kept, spec_for


class Sources(NamedTuple):
    """What is normalised: dropout(x) + residual, of one shape; `p` is dropout's probability.

    Without a residual and with p = 0 it is x.
    """

    x: Tensor
    residual: Tensor | None = None
    p: float = 0.0

    def total(self) -> Tensor:
        """Return the sum, by operators of its own."""
        x, residual, p = self
        if residual is None:
            return dropout(x, p)
        return dropout_add(x, residual, p) if p else x + residual


class Normed(NamedTuple):
    """The result of a norm: `y`; `residual_sum`, what was normalised; `kept`, for linears().

    It holds y as long as it lives: a block that holds it through its attention holds that memory.
    """

    y: Tensor
    residual_sum: Tensor
    kept: Kept


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Normed:
    """Normalise by the root mean square over the last dimension, after adding a residual.

    Args:
        x: bfloat16, float16, float32 or float64.
        weight: [last dimension] or None.
        eps: added to the mean square; None is the smallest step of the type that is computed in.
        residual: of the shape of x, added to it first; None is none.
        keep: how what backward needs is kept: bits, group_size, symmetric and rounding count, and
            with level "keep" it is kept exactly, as x's type has it; None is int8.

    Returns:
        Normed: y of x's type (float32 under autocast on a GPU, as torch's own); x + residual, or x;
        and what linears() takes.

    Raises:
        InvalidValueError: a shape does not fit, a tensor is not floating, or `keep` is none.

    Memory: kept as the head of this file says; nothing without grad mode. Temporary: none by a
    kernel; where 4 bits or the group's size need a second pass, 2 bytes an element.
    Sync: none.
    Double backward: works, on what was decoded.

    Example:
        >>> x = torch.randn(4, 256)
        >>> normed = rms_norm(x, torch.ones(256), 1e-6)
        >>> torch.allclose(normed.y, torch.nn.functional.rms_norm(x, (256,), eps=1e-6), atol=1e-6)
        True
    """
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return norm(Sources(x, residual), (weight, None), (eps, False), keep)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Normed:
    """Subtract the mean over the last dimension and divide by the deviation, after a residual.

    Arguments, results and costs as rms_norm()'s, with a bias.

    Example:
        >>> x = torch.randn(4, 256)
        >>> y, residual_sum, kept = layer_norm(x, residual=torch.ones(4, 256))
        >>> torch.equal(residual_sum, x + 1)
        True
    """
    return norm(Sources(x, residual), (weight, bias), (eps, True), keep)


def norm(
    sources: Sources,
    affine: tuple[Tensor | None, Tensor | None],
    how: tuple[float, bool],
    keep: Compression | None,
    dtype: torch.dtype | None = None,
) -> Normed:
    """Return what rms_norm() and layer_norm() do, and y of a type that is asked for.

    Args:
        sources: what is normalised; masks of dropout are dropout.py's.
        affine: weight and bias.
        how: eps, and whether the mean is subtracted.
        dtype: of y, floating; None is torch's own. What would be cast to it alone may as well be
            rounded to it at once: the values are the same.
    """
    x, residual, p = sources
    eps, centred = how
    _check(x, residual, affine)
    level = levels_kept(p) if p else ALL_KEPT
    key = None if level == ALL_KEPT else new_key(x)
    spec, stored = spec_for(keep), arguments.sum_dtype(x, residual)
    y, total, buffer, rstd, probe = _operators.norm(
        x, residual, key, level, *affine, eps, centred,
        dtype or _result_dtype(x, stored), list(spec),
    )  # fmt: skip
    kept = Kept(buffer, probe, rstd, *affine, eps, centred, stored, spec)
    return Normed(y, x if residual is None and key is None else total, kept)


def _result_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type of y: under autocast on a GPU norms are among what is done in float32."""
    half = dtype in (torch.bfloat16, torch.float16)
    if half and x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
        return torch.float32
    return dtype


def _check(x: Tensor, residual: Tensor | None, affine: tuple[Tensor | None, Tensor | None]) -> None:
    arguments.check_floats(x=x, residual=residual)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise arguments.misshaped("x", x, "is one with a row")
    if residual is not None:
        arguments.check_same_shape("x", x, "residual", residual)
    for name, vector in zip(("weight", "bias"), affine, strict=True):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise arguments.misshaped(name, vector, f"is {tuple(x.shape[-1:])}")


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm that keeps one packed tensor: the same arguments, parameters and result.

    `keep`, a Compression or None, says how; None is int8. A norm over more than one dimension is
    torch's own.

    Example:
        >>> RMSNorm(256)(torch.randn(4, 256)).shape
        torch.Size([4, 256])
    """

    keep: Compression | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        return _forward(self, x, super().forward)

    def normed(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        """Return rms_norm()'s result: with the sum, and what linears() takes."""
        return rms_norm(x, self.weight, self.eps, residual, self.keep)


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm that keeps one packed tensor: the same arguments, parameters and result.

    `keep` as RMSNorm's.

    Example:
        >>> norm = LayerNorm(256)
        >>> norm.keep = Compression(level="int4")
        >>> norm.normed(torch.randn(4, 256)).kept.spec.bits
        4
    """

    keep: Compression | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        return _forward(self, x, super().forward)

    def normed(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        """Return layer_norm()'s result: with the sum, and what linears() takes."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual, self.keep)


def _forward(module: Any, x: Tensor, otherwise: Callable[[Tensor], Tensor]) -> Tensor:
    if len(module.normalized_shape) == 1:
        y: Tensor = module.normed(x).y
        return y
    return otherwise(x)
