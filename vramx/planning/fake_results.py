"""Results of operations whose size depends on data, or that have no fake kernel: the largest ones.

Where the values that decide are known (fake_values.py) the result is exact. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vramx.planning.fake_values import keep_value, real, value_of

Assume = Callable[[str], None]
_aten = torch.ops.aten
_FUSED_OPTIMIZERS = ("aten::_fused_adam", "aten::_fused_sgd_", "aten::_fused_adagrad_")
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


def bounded(func: Any, args: Any, kwargs: dict[str, Any], assume: Assume) -> Any:
    """Return the largest result of an operation whose size depends on data.

    NotImplemented for all others.
    """
    if func.name().startswith(_FUSED_OPTIMIZERS):
        return None  # in place, and some of them have no fake kernel
    if func in _INDEXING:
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        if not masks:
            return NotImplemented
        assume("indexing by a mask is taken to select all elements")
        return func(args[0], _indices(args[1]), *args[2:])
    result, text = _RESULTS.get(func, (None, ""))
    if result is None:
        return NotImplemented
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    made = result(given)
    if text and made is not NotImplemented:
        assume(text)
    return made


def _indices(indices: Any) -> list[Any]:
    """Return masks among indices as the indices that they stand for: one a dimension."""
    found: list[Any] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            found += [each.new_empty(each.numel(), dtype=torch.int64) for _ in each.shape]
        else:
            found.append(each)
    return found


def _nonzero(given: dict[str, Any]) -> Tensor:
    x: Tensor = given["self"]
    return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)


def _masked_select(given: dict[str, Any]) -> Tensor:
    shape = torch.broadcast_shapes(given["self"].shape, given["mask"].shape)
    return given["self"].new_empty(shape.numel())  # type: ignore[no-any-return]


def _bincount(given: dict[str, Any]) -> Any:
    if not given["minlength"]:
        return NotImplemented
    weights = given["weights"]
    counted = torch.int64 if weights is None else weights.dtype
    exact = counted in (torch.int64, torch.float32)
    return given["self"].new_empty(given["minlength"], dtype=counted if exact else torch.float64)


def _unique(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    x, dim = given["self"], given.get("dim")
    count = x.numel() if dim is None else x.shape[dim]
    shape = (count,) if dim is None else x.shape
    inverse = x.new_empty(
        (x.shape if dim is None else count) if given.get("return_inverse", True) else 0,
        dtype=torch.int64,
    )
    counts = x.new_empty(count if given["return_counts"] else 0, dtype=torch.int64)
    return x.new_empty(shape), inverse, counts


def _repeats(given: dict[str, Any]) -> Any:
    known = value_of(given["repeats"])
    if known is None or given["output_size"] is not None:
        return NotImplemented
    with real():
        found = _aten.repeat_interleave.Tensor(known)
    made = given["repeats"].new_empty(len(found))
    keep_value(made, found)
    return made


def _gru_cell(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    state = given["hx"]
    return torch.empty_like(state), state.new_empty((state.shape[0], 5 * state.shape[1]))


def _gru_cell_backward(given: dict[str, Any]) -> tuple[Tensor | None, ...]:
    gradient = given["grad_hy"]
    gates = (gradient.shape[0], 3 * gradient.shape[1])
    of_bias = gradient.new_empty(gates[1]) if given["has_bias"] else None
    again = None if of_bias is None else torch.empty_like(of_bias)
    made = gradient.new_empty(gates), gradient.new_empty(gates), torch.empty_like(gradient)
    return (*made, of_bias, again)


def _ctc(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    probabilities, targets = given["log_probs"], given["targets"]
    lengths = given["target_lengths"]
    # Lengths on a GPU are a tensor, and then the kernel itself takes the whole width.
    longest = targets.shape[-1] if isinstance(lengths, Tensor) else max(lengths, default=0)
    steps, count = probabilities.shape[0], probabilities.shape[1]
    made = probabilities.new_empty(count)
    return made, probabilities.new_empty((count, steps, 2 * longest + 1))


def _not_of_a_library(_: dict[str, Any]) -> bool:
    return False


def _like_probabilities(given: dict[str, Any]) -> Tensor:
    return torch.empty_like(given["log_probs"])


def _grouped_product(given: dict[str, Any]) -> Tensor:
    """Return a product of each group; torch's fake kernel takes bfloat16 alone."""
    a, b = given["self"], given["mat2"]
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape.insert(0, a.shape[0] if a.dim() == 3 else given["offs"].shape[0])
    return a.new_empty(shape, dtype=given["out_dtype"] or a.dtype)  # type: ignore[no-any-return]


def _statistics(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x = given["input"]
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def _sums_of_channels(given: dict[str, Any]) -> tuple[Tensor | None, ...]:
    wanted = (given["input_g"], given["input_g"], given["weight_g"], given["bias_g"])
    return tuple(torch.empty_like(given["mean"]) if each else None for each in wanted)


def _mean_of_losses(given: dict[str, Any]) -> Any:
    """Return the one number of a loss that torch makes in the memory of a loss for each element."""
    if given["reduction"] == 0:
        return NotImplemented
    x, target = given["self"], given["target"]
    shape = torch.broadcast_shapes(x.shape, target.shape)
    made = x.new_empty(shape, dtype=torch.promote_types(x.dtype, target.dtype))
    return made.as_strided((), ())


def _named(name: str) -> Any:
    """Return an operation, None in releases of torch that have none of this name."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet, None), overload, None)


_Result = Callable[[dict[str, Any]], Any]
_RESULTS: dict[Any, tuple[_Result, str]] = {
    _named(name): (result, text)
    for result, text, names in (
        (_nonzero, "nonzero() is taken to find all elements", "nonzero.default"),
        (
            *(_masked_select, "masked_select() is taken to select all elements"),
            "masked_select.default",
        ),
        (
            *(_bincount, "bincount() is taken to find no value above its minlength"),
            "bincount.default",
        ),
        (
            *(_unique, "unique() is taken to find no element twice"),
            "_unique2.default unique_dim.default unique_consecutive.default",
        ),
        (_repeats, "", "repeat_interleave.Tensor"),
        (_gru_cell, "", "_thnn_fused_gru_cell.default"),
        (_gru_cell_backward, "", "_thnn_fused_gru_cell_backward.default"),
        (_ctc, "", "_ctc_loss.default _ctc_loss.Tensor"),
        (_like_probabilities, "", "_ctc_loss_backward.default _ctc_loss_backward.Tensor"),
        (_grouped_product, "", "_grouped_mm.default"),
        (_statistics, "", "batch_norm_update_stats.default"),
        (_sums_of_channels, "", "batch_norm_backward_reduce.default"),
        (
            _mean_of_losses,
            "",
            "mse_loss.default smooth_l1_loss.default soft_margin_loss.default "
            "binary_cross_entropy.default",
        ),
        (_not_of_a_library, "", "_use_cudnn_ctc_loss.default _use_cudnn_ctc_loss.Tensor"),
        (_not_of_a_library, "", "_use_miopen_ctc_loss.default _use_miopen_ctc_loss.Tensor"),
    )
    for name in names.split()
}
_RESULTS.pop(None, None)
