"""The operators of batch, group and instance norm: what autograd and the compiler see of them.

    vramx::channel_norm           y, the statistics, and what is kept
    vramx::channel_norm_backward  from what was kept
    vramx::channel_norm_output    y again, for the weights of the convolution that follows

Each runs a kernel where there is one for the device, the type and the shape, and plain torch
elsewhere. Statistics and the sums of backward are torch's own reductions. Statistics that run are
the caller's: an operator with a gradient may change no tensor. 4 bits are packed in a second pass.
Arguments are trusted: batch_norm.py and group_norm.py check them. Operators have flat schemas,
hence their many arguments. A call never waits for the device; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.kernels import channel_norm_launch as launch
from vramx.nn import channel_norm_passes as passes
from vramx.nn import reference_channel_norm as reference
from vramx.nn.differentiation import attach, differentiable_gradients, new_probe
from vramx.nn.keeping import NOTHING, ORDERS, Spec, buffer_bytes, decode, dense_like
from vramx.nn.operators import operator


@operator(
    "vramx::channel_norm",
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? rstd, "
    "bool given, int groups, float eps, str kind, float leak, int[] spec) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def channel_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    given: bool,  # noqa: ARG001
    groups: int,
    eps: float,
    kind: str,
    leak: float,
    spec: list[int],
) -> tuple[Tensor | None, ...]:
    """Return y, mean and variance, rstd by table, the buffer, the bits, and the probe.

    mean, rstd: of channels, in float32 or wider, where the caller knows them: then none of the
    three are returned. given: they are constants, and not of x. With NOTHING nothing is kept.
    """
    norm, form = passes.Norm(groups, eps, kind, leak), Spec(*spec)
    order = ORDERS[form.order]
    x = x.contiguous(memory_format=order)
    residual = None if residual is None else residual.contiguous(memory_format=order)
    shape = reference.Shape(groups, x.shape)
    returned: tuple[Tensor | None, ...] = (None, None, None)
    if mean is None or rstd is None:
        mean, var = passes.statistics(x, groups)
        rstd = reference.table_of(torch.rsqrt(var + eps), shape)
        returned = mean, var, rstd
        mean = reference.table_of(mean, shape)
    tables = (mean, rstd, *passes.parameter_tables((weight, bias), shape))
    run = passes.forward_kernel if passes.has_kernel(x, shape, form) else passes.forward_reference
    y, buffer, bits = run((x, residual), tables, norm, form)
    if form.bits == NOTHING:
        return y, *returned[:2], None, buffer, bits, None
    return y, *returned, buffer, bits, new_probe(x)


@channel_norm.register_fake
def _(x: Tensor, _residual: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    _, _, mean, _, _, *how, spec = others
    form, norm = Spec(*spec), passes.Norm(*how)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels, samples = x.shape[1], x.shape[0]
    means, rows = (samples * norm.groups, samples * channels) if norm.groups else (channels,) * 2
    found = [
        x.new_empty(0) if mean is not None else x.new_empty(size, dtype=dtype)
        for size in (means, means, rows)
    ]
    if form.bits == NOTHING:
        return dense_like(x, form.order), *found[:2], *[x.new_empty(0) for _ in range(4)]
    buffer = x.new_empty(buffer_bytes(x.numel(), x.dtype, form), dtype=torch.uint8)
    return dense_like(x, form.order), *found, buffer, passes.new_bits(x, norm), new_probe(x)


@operator(
    "vramx::channel_norm_backward",
    schema="(Tensor dy, Tensor? weight, Tensor? bias, Tensor kept, Tensor rstd, Tensor bits, "
    "int groups, bool given, str kind, float leak, ScalarType stored, int[] wanted, int[] spec) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def channel_norm_backward(
    dy: Tensor, weight: Tensor | None, bias: Tensor | None, kept: Tensor, rstd: Tensor,
    bits: Tensor, groups: int, given: bool, kind: str, leak: float, stored: torch.dtype,
    wanted: list[int], spec: list[int],
) -> passes.Results:  # fmt: skip
    """Return the gradients of x, of the residual, of weight and of bias; None if not wanted.

    given: the statistics were, and have no gradient. wanted: of the four.
    """
    norm, form = passes.Norm(groups, 0.0, kind, leak), Spec(*spec)
    dy = dy.to(stored).contiguous(memory_format=ORDERS[form.order])
    shape = reference.Shape(groups, dy.shape)
    run = passes.backward_reference
    if passes.has_kernel(dy, shape, form):
        run = passes.backward_kernel
    how = passes.Backward(norm, form, shape, given, wanted)
    return run(dy, (kept, bits), (weight, bias, rstd), how)


@channel_norm_backward.register_fake
def _(dy: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    rstd, stored, wanted, spec = others[1], *others[-3:]
    dx, dresidual = (
        dense_like(dy.to(stored), Spec(*spec).order) if want else dy.new_empty(0)
        for want in wanted[:2]
    )
    dweight, dbias = (
        (rstd if vector is None else vector).new_empty(dy.shape[1]) if want else dy.new_empty(0)
        for vector, want in zip((weight, bias), wanted[2:], strict=True)
    )
    return dx, dresidual, dweight, dbias


@operator(
    "vramx::channel_norm_output",
    schema="(Tensor kept, Tensor bits, Tensor? weight, Tensor? bias, SymInt[] shape, int groups, "
    "str kind, float leak, ScalarType stored, ScalarType dtype, int[] spec) -> Tensor",
)
def channel_norm_output(
    kept: Tensor, bits: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int],
    groups: int, kind: str, leak: float, stored: torch.dtype, dtype: torch.dtype, spec: list[int],
) -> Tensor:  # fmt: skip
    """Return y again in `dtype`, of a norm without a residual; `stored` is what was packed."""
    norm, form = passes.Norm(groups, 0.0, kind, leak), Spec(*spec)
    sizes = reference.Shape(groups, torch.Size(shape))
    y = passes.empty_in_order(kept, shape, stored, form.order)
    tables = passes.parameter_tables((weight, bias), sizes)
    if passes.has_kernel(y, sizes, form):
        channels, layout, *_ = passes.places_of(y.shape, groups, form)
        buffer = kept if layout else decode(kept, shape, stored, form)
        source = launch.Kept(buffer, bits if norm.by_sign() else None, layout)
        launch.output(source, tables, y, (channels, norm.activation()))
        return y.to(dtype)
    n = reference.by_channel(passes.decode_wide(kept, y, form), groups)
    z = reference.affine(n, *tables, None).reshape(y.shape)
    signs = passes.passing(bits, y.shape, form.order) if norm.by_sign() else None
    y.copy_(reference.activate(z, kind, leak, signs))
    return y.to(dtype)


@channel_norm_output.register_fake
def _(kept: Tensor, *others: Any) -> Tensor:
    shape, dtype, spec = others[3], others[-2], others[-1]
    return passes.empty_in_order(kept, shape, dtype, Spec(*spec).order)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, known, given, *how, spec = inputs
    _, *found, rstd, kept, bits, probe = output
    ctx.set_materialize_grads(False)
    constants = [each for each in (*found, rstd, kept, bits) if each is not None]
    ctx.mark_non_differentiable(*constants)
    ctx.save_for_backward(kept, rstd if known is None else known, bits, probe, weight, bias)
    ctx.norm, ctx.spec, ctx.given = passes.Norm(*how), spec, given
    ctx.dtype, ctx.has_residual = x.dtype, residual is not None


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    dy, dprobe = gradients[0], gradients[-1]
    kept, rstd, bits, probe, weight, bias = ctx.saved_tensors
    wanted = [int(need) for need in ctx.needs_input_grad[:4]]
    none = (None,) * 8
    if dy is None:
        return dprobe, None, None, None, *none
    norm = ctx.norm
    if torch.is_grad_enabled():
        found = _differentiable_backward(ctx, dy, (kept, rstd, bits, probe), (weight, bias))
    else:
        results = channel_norm_backward(
            dy, weight, bias, kept, rstd, bits, norm.groups, ctx.given, norm.kind, norm.leak,
            ctx.dtype, wanted, ctx.spec,
        )  # fmt: skip
        found = [each if want else None for each, want in zip(results, wanted, strict=True)]
    if dprobe is not None:
        found[0] = dprobe if found[0] is None else found[0] + dprobe
    return *found, *none


def _differentiable_backward(
    ctx: Any, dy: Tensor, kept: tuple[Tensor, Tensor, Tensor, Tensor], parameters: passes.Tables
) -> list[Tensor | None]:
    """Return the same gradients by operations that have gradients themselves."""
    (buffer, rstd, bits, probe), (weight, bias) = kept, parameters
    x = input_again(buffer, rstd, probe, ctx.norm.groups, ctx.spec)
    # Its value has no part in any derivative: what it adds to the sign is in the bits.
    residual = torch.zeros_like(x).requires_grad_() if ctx.has_residual else None
    found = differentiable_gradients(
        lambda x, residual, weight, bias: output_again(
            x, residual, (weight, bias), ctx.norm, (rstd if ctx.given else None, bits, ctx.spec)
        ).to(dy.dtype),
        (x, residual, weight, bias),
        dy,
    )
    return [
        each if each is None else each.to(dtype)
        for each, dtype in zip(
            found, (ctx.dtype, ctx.dtype, *map(_dtype, (weight, bias))), strict=True
        )
    ]


def input_again(
    kept: Tensor, rstd: Tensor, probe: Tensor, groups: int, spec: Sequence[int]
) -> Tensor:
    """Return a norm's input, up to a constant for each mean, in its place in the graph."""
    n = reference.by_channel(passes.decode_wide(kept, probe, Spec(*spec)), groups)
    return attach((n / reference.along(rstd, n)).reshape(probe.shape), probe)


def output_again(
    x: Tensor,
    residual: Tensor | None,
    parameters: passes.Tables,
    norm: passes.Norm,
    kept: tuple[Tensor | None, Tensor, Sequence[int]],
) -> Tensor:
    """Return y of what input_again() gives; `kept` are factors that were given, bits and spec."""
    given, bits, spec = kept
    signs = passes.passing(bits, x.shape, Spec(*spec).order) if norm.by_sign() else None
    shape = reference.Shape(norm.groups, x.shape)
    return reference.composition(
        x, residual, parameters, (shape, norm.eps, given), (norm.kind, norm.leak, signs)
    )


channel_norm.register_autograd(_backward, setup_context=_setup)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
