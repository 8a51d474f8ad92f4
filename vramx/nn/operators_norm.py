"""The operators of the norms: what autograd and the compiler see of the kernels.

    vramx::norm           y, the sum with the residual, and what is kept of it
    vramx::norm_backward  from what was kept
    vramx::norm_output    y again, for the weights of the Linears that follow

Each runs a kernel where there is one for the device, the type and the length of the row, and plain
torch elsewhere. A format that the kernels do not pack in the same pass (4 bits, a group that does
not divide the row) takes a second pass through the codec. The stream of noise is drawn inside,
where a compiler does not see the number. Arguments are trusted: norm.py checks them. Operators have
flat schemas, hence their many arguments. A call never waits for the device; any thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vramx.kernels import norm_backward_launch, norm_launch
from vramx.nn import passes
from vramx.nn import reference_norm as reference
from vramx.nn.arguments import cast_to_common, sum_dtype
from vramx.nn.differentiation import new_probe
from vramx.nn.dropout import drop_again
from vramx.nn.keeping import (
    NOTHING,
    Spec,
    buffer_bytes,
    draw,
    encode,
)
from vramx.nn.norm_kept import (
    contiguous_of,
    has_kernel,
    input_again,
    normalised_of,
    output_again,
    packs_in_kernel,
    rows_of,
)
from vramx.nn.operators import operator
from vramx.nn.products import cast


@operator(
    "vramx::norm",
    schema="(Tensor x, Tensor? residual, Tensor? key, int level, Tensor? weight, Tensor? bias, "
    "float eps, bool centred, ScalarType dtype, int[] spec) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def norm(
    x: Tensor, residual: Tensor | None, key: Tensor | None, level: int, weight: Tensor | None,
    bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype, spec: list[int],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y of `dtype`, the sum, the buffer, rstd, and the probe.

    The sum, of the type that x and residual are promoted to, is dropout(x) + residual; None if x
    itself is normalised. key and level: of dropout.py's masks; no key, no dropout. weight, bias:
    [last dimension]. The buffer, rstd and the probe are empty if `spec` is NOTHING.
    """
    added = _added(x, residual, key, level)
    if added is not None:
        x, residual = added, None
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    affine, kind = norm_launch.Affine(weight, bias), Spec(*spec)
    run = _norm_kernel if has_kernel(x) else _norm_reference
    y, total, kept, rstd = run((x, residual), affine, (eps, centred), dtype, kind)
    return y, total if added is None else added, kept, rstd, _probe(x, kind)


def _added(x: Tensor, residual: Tensor | None, key: Tensor | None, level: int) -> Tensor | None:
    """Return dropout(x) + residual, where no norm's kernel makes it: after dropout, of two types.

    None: the kernel adds, or there is nothing to add.
    """
    if key is not None:
        if residual is not None:
            x, residual = cast_to_common(x, residual)
        return drop_again(x, key, level, residual)
    return None if residual is None or residual.dtype == x.dtype else x + residual


_TO_NEAREST = norm_launch.Noise(None, 0)
_Sources = tuple[Tensor, Tensor | None]
_Norm = tuple[Tensor, Tensor | None, Tensor, Tensor]


def _norm_kernel(
    sources: _Sources,
    affine: norm_launch.Affine,
    how: tuple[float, bool],
    dtype: torch.dtype,
    spec: Spec,
) -> _Norm:
    x, residual = sources
    y = torch.empty_like(x, dtype=dtype)
    total = None if residual is None else torch.empty_like(x)
    keeps = spec.bits != NOTHING
    group_size = spec.group_size if packs_in_kernel(x, spec) else 0
    kept, noise = None, _TO_NEAREST
    rstd = x.new_empty(x.shape[:-1] if keeps else 0, dtype=torch.float32)
    if group_size:
        kept = x.new_empty(buffer_bytes(x.numel(), x.dtype, spec), dtype=torch.uint8)
        if drawn := draw(x.device, spec, 1):
            noise = norm_launch.Noise(drawn.state, *drawn.streams)
    elif keeps:
        kept = torch.empty_like(x)
    target = None if kept is None or passes.saves_are_unread() else kept
    norm_launch.norm_forward(
        sources,
        contiguous_of(affine),
        (y, total),
        None if target is None else norm_launch.Kept(target, rstd, group_size),
        (*how, noise),
    )
    if kept is None:
        return y, total, x.new_empty(0, dtype=torch.uint8), rstd
    return y, total, kept if group_size else encode(kept, spec), rstd


def _norm_reference(
    sources: _Sources,
    affine: norm_launch.Affine,
    how: tuple[float, bool],
    dtype: torch.dtype,
    spec: Spec,
) -> _Norm:
    x, residual = sources
    total = None if residual is None else x + residual
    normalised, rstd = reference.normalise(x if total is None else total, *how)
    y = reference.affine(normalised, *affine).to(dtype)
    if y is normalised:
        y = y.clone()  # what is kept must not be the caller's to change
    if spec.bits == NOTHING:
        return y, total, x.new_empty(0, dtype=torch.uint8), rstd.new_empty(0)
    if not packs_in_kernel(x, spec):
        normalised = normalised.to(x.dtype)  # as the kernel would write it for a second pass
    return y, total, encode(normalised, spec), rstd


@norm.register_fake
def _(
    x: Tensor, residual: Tensor | None, key: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    dtype, spec = others[-2:]
    kind = Spec(*spec)
    y, total = x.new_empty(x.shape, dtype=dtype), None
    if residual is not None or key is not None:
        x = total = x.new_empty(x.shape, dtype=sum_dtype(x, residual))
    kept = x.new_empty(buffer_bytes(x.numel(), x.dtype, kind), dtype=torch.uint8)
    rstd = x.new_empty(
        0 if kind.bits == NOTHING else x.shape[:-1],
        dtype=torch.promote_types(x.dtype, torch.float32),
    )
    return y, total, kept, rstd, _probe(x, kind)


@operator(
    "vramx::norm_backward",
    schema="(Tensor dy, Tensor? dsum, Tensor? weight, Tensor kept, Tensor rstd, bool centred, "
    "ScalarType dtype, int[] wanted, int[] spec) -> (Tensor, Tensor, Tensor)",
)
def norm_backward(
    dy: Tensor, dsum: Tensor | None, weight: Tensor | None, kept: Tensor, rstd: Tensor,
    centred: bool, dtype: torch.dtype, wanted: list[int], spec: list[int],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x (of `dtype`, as x was), of weight and of bias; None if not wanted.

    dsum: the gradient of the sum, which dx contains.
    """
    dy = dy.contiguous()
    dsum = None if dsum is None else dsum.contiguous()
    kind = Spec(*spec)
    vectors = _new_vectors(dy, weight, wanted)
    if not has_kernel(dy):
        normalised = normalised_of(kept, dy, dtype, kind)
        dx = reference.gradient(dy, normalised, rstd, weight, centred)
        dx = dx.to(dtype) if dsum is None else (dx + dsum).to(dtype)
        for vector, total in zip(vectors, reference.sums(dy, normalised), strict=True):
            if vector is not None:
                vector.copy_(total)
        return dx, *vectors
    dx = torch.empty_like(dy, dtype=dtype)
    norm_backward_launch.norm_backward(
        (dy, dsum),
        None if weight is None else weight.contiguous(),
        rows_of(kept, dx, kind, rstd),
        dx,
        (norm_backward_launch.Shares(*vectors), centred),
    )
    return dx, *vectors


@norm_backward.register_fake
def _(
    dy: Tensor, _dsum: Tensor | None, weight: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    dtype, wanted, _ = others[-3:]
    return dy.new_empty(dy.shape, dtype=dtype), *_new_vectors(dy, weight, wanted)


@operator(
    "vramx::norm_output",
    schema="(Tensor kept, Tensor? weight, Tensor? bias, SymInt[] shape, ScalarType stored, "
    "ScalarType dtype, int[] spec) -> Tensor",
)
def norm_output(
    kept: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], stored: torch.dtype,
    dtype: torch.dtype, spec: list[int],
) -> Tensor:  # fmt: skip
    """Return what was kept, times weight, plus bias, in `dtype`; `stored` is what was packed."""
    return output_again(kept, (weight, bias), shape, (stored, dtype), spec)


@norm_output.register_fake
def _(
    kept: Tensor, _weight: Tensor | None, _bias: Tensor | None, shape: list[int], *others: Any
) -> Tensor:
    _, dtype, _ = others
    return kept.new_empty(shape, dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    x, residual, key, ctx.level, weight, bias, *how = inputs
    _, total, kept, rstd, probe = output
    ctx.set_materialize_grads(False)
    # torch.library has an empty tensor for a sum that is none.
    unsummed = [total] if residual is None and key is None and total is not None else []
    ctx.mark_non_differentiable(kept, rstd, *unsummed)
    ctx.save_for_backward(kept, rstd, probe, weight, key)
    ctx.eps, ctx.centred, _, ctx.spec = how
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.dtype = sum_dtype(x, residual)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.drops = key is not None


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    dy, dsum, _, _, dprobe = gradients
    # The probe stands for what is normalised: the sum, or x.
    if dprobe is not None:
        dsum = dprobe if dsum is None else dsum + dprobe
    # Read once: a checkpoint gives each tensor once.
    saved: Any = ctx.saved_tensors if dy is not None or ctx.drops else (None,)
    found: tuple[Tensor | None, ...]
    if dy is None:
        found = dsum, None, None
    elif torch.is_grad_enabled():
        found = _differentiable_backward(ctx, saved[:-1], dy, dsum)
    else:
        needs_weight, needs_bias = ctx.needs_input_grad[4:6]
        wanted = [int(needs_weight), int(needs_bias)]
        kept, rstd, _, weight, _ = saved
        found = norm_backward(
            dy, dsum, weight, kept, rstd, ctx.centred, ctx.dtype, wanted, ctx.spec
        )
    return *_of_sources(ctx, found[0], saved[-1]), *_of_affine(ctx, *found[1:]), *(None,) * 4


def _of_sources(ctx: Any, dsum: Tensor | None, key: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, the residual, key and level from that of what is normalised."""
    if dsum is None:
        return None, None, None, None
    of_x, of_residual = ctx.dtypes
    dx = dsum
    if key is not None and ctx.needs_input_grad[0]:
        dx = drop_again(dsum, key, ctx.level)
    return cast(dx, of_x), None if of_residual is None else cast(dsum, of_residual), None, None


def _of_affine(
    ctx: Any, dweight: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    needs_weight, needs_bias = ctx.needs_input_grad[4:6]
    if not needs_bias or dbias is None:
        return dweight if needs_weight else None, None
    return dweight if needs_weight else None, cast(dbias, ctx.bias_dtype)


def _differentiable_backward(
    ctx: Any, saved: tuple[Any, ...], dy: Tensor, dsum: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the same gradients by operations that have gradients themselves."""
    kept, rstd, probe, weight = saved
    s = input_again(kept, rstd, probe, Spec(*ctx.spec))
    normalised, factor = reference.normalise(s, ctx.eps, ctx.centred)
    dx = reference.gradient(dy, normalised, factor, weight, ctx.centred)
    dx = dx if dsum is None else dx + dsum
    dweight, dbias = reference.sums(dy, normalised)
    return dx.to(ctx.dtype), dweight if weight is None else dweight.to(weight.dtype), dbias


norm.register_autograd(_backward, setup_context=_setup)


def _probe(x: Tensor, spec: Spec) -> Tensor:
    return x.new_empty(0) if spec.bits == NOTHING else new_probe(x)


def _new_vectors(
    dy: Tensor, weight: Tensor | None, wanted: list[int]
) -> tuple[Tensor | None, Tensor | None]:
    like, size = dy if weight is None else weight, dy.shape[-1]
    dweight, dbias = wanted
    return like.new_empty(size) if dweight else None, like.new_empty(size) if dbias else None
