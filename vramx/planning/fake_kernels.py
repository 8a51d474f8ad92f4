"""What torch decides in C++ where there is a GPU, decided here for tensors without data.

Which kernel attention runs depends on a GPU: nn/attention_kernels.py has torch's rules, here for
one of compute capability 9.0 where torch prefers flash to cuDNN, which take the same. Values are
not known: a float that is read is taken for zero, results whose size depends on data for the
largest, and other reads are an error that names the operation. Pure; any thread.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from vramx.errors import UntraceableError
from vramx.nn import attention_kernels

_attention = functional.scaled_dot_product_attention
_HEAD_MULTIPLE = 8  # elements
_FUSED_OPTIMIZERS = ("aten::_fused_adam", "aten::_fused_sgd_", "aten::_fused_adagrad_")
Assume = Callable[[str], None]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run scaled_dot_product_attention by the kernel that a GPU would choose for it."""
    tensors, width = (query, key, value), query.shape[-1]
    if query.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        tensors = (query.to(dtype), key.to(dtype), value.to(dtype))
    scale = width**-0.5 if scale is None else scale
    q, k, v = padded = tuple(map(_padded, tensors))
    call = attention_kernels.Call(attention_kernels.NO_KERNEL, dropout_p, is_causal, scale)
    kernel = attention_kernels.choose((q, k, v), attn_mask, call, enable_gqa)
    if kernel == attention_kernels.FLASH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return cast(Tensor, flash(*padded, dropout_p, is_causal, scale=scale)[0])[..., :width]
    if kernel == attention_kernels.EFFICIENT and k.shape[1] == q.shape[1]:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        mask = attention_kernels.prepared_mask(attn_mask, q, k)
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        found = efficient(*padded, mask, learns, dropout_p, is_causal, scale=scale)[0]
        return cast(Tensor, found)[..., :width]
    options = (attn_mask, dropout_p, is_causal)
    return _attention(query, key, value, *options, scale=scale, enable_gqa=enable_gqa)


def _padded(x: Tensor) -> Tensor:
    """Return heads as wide as kernels of attention need them."""
    missing = -x.shape[-1] % _HEAD_MULTIPLE
    return functional.pad(x, (0, missing)) if missing and x.device.type == "cuda" else x


# -- Data that is not there ------------------------------------------------------------------------


def read_value(tensor: Tensor, assume: Assume) -> Any:
    """Return what item() returns: a number that is known, or zero for a float.

    Raises:
        UntraceableError: it is an integer or a truth value, on which sizes and branches depend.
    """
    known = getattr(tensor, "constant", None)
    if known is not None:
        return known.item()
    if tensor.is_floating_point() and tensor.device.type == "cuda":
        assume("floats of the GPU that the step reads, as by item(), are taken for 0.0")
        return 0.0
    if tensor.is_floating_point():
        return 1.0  # what counts an optimizer's steps
    raise UntraceableError(
        f"the step reads a value of {_named(tensor.dtype)} that depends on data, by item(), int(), "
        f"bool() or an if{_place()}; compute it before the step, or have predict run without it"
    )


def bounded(func: Any, args: Any, assume: Assume) -> Any:
    """Return the largest result of an operation whose size depends on data.

    NotImplemented for all others.
    """
    aten = torch.ops.aten
    if func.name().startswith(_FUSED_OPTIMIZERS):
        return None  # in place, and some of them have no fake kernel
    if func is aten.nonzero.default:
        assume("nonzero() is taken to find all elements")
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
    if func is aten.masked_select.default:
        assume("masked_select() is taken to select all elements")
        return args[0].new_empty(args[0].numel())
    if func is aten.bincount.default and len(args) > 2:
        assume("bincount() is taken to find no value above its minlength")
        counted = torch.int64 if args[1] is None else args[1].dtype
        exact = counted in (torch.int64, torch.float32)
        return args[0].new_empty(args[2], dtype=counted if exact else torch.float64)
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        if masks:
            assume("indexing by a mask is taken to select all elements")
            return func(args[0], _indices(args[1]), *args[2:])
    return NotImplemented


def _indices(indices: Any) -> list[Any]:
    """Return masks among indices as the indices that they stand for: one a dimension."""
    found: list[Any] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            found += [each.new_empty(each.numel(), dtype=torch.int64) for _ in each.shape]
        else:
            found.append(each)
    return found


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place() -> str:
    """Return the line of the program that asks, of what is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and "/vramx/planning/" not in frame.filename:
            return f" ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
    return ""


# A function -> what runs for it on the fake GPU.
REPLACED: dict[Any, Any] = {_attention: attention}
