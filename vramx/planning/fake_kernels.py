"""What torch decides in C++ where there is a GPU, decided here for tensors without data.

Which kernel attention runs depends on a GPU: nn/attention_kernels.py has torch's rules, here for
one of compute capability 9.0 where torch prefers flash to cuDNN, which take the same. Pure; any
thread.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from vramx.nn import attention_kernels

_attention = functional.scaled_dot_product_attention
_HEAD_MULTIPLE = 8  # elements


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


# A function -> what runs for it on the fake GPU.
REPLACED: dict[Any, Any] = {_attention: attention}
