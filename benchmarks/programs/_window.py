"""Causal attention that looks back at a window of tokens: the memory of all of it, in less time.

Attention of a million tokens takes an hour a step, and what it takes of memory does not depend on
how far back it looks: the same kernel of flash attention is told a window, for torch's
scaled_dot_product_attention and for vramx's blocks alike. On a GPU; what runs on the host is as it
was. Imports no vramx before it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional


def _forward(heads: Any, scale: float | None, window: int) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithm of the sums of exponentials."""
    q, k, v = (x.transpose(1, 2) for x in heads)
    y, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False,
        scale=scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip
    return y.transpose(1, 2), sums


def _backward(
    dy: Tensor, tensors: Any, sums: Tensor, scale: float | None, window: int
) -> list[Tensor]:
    """Return the gradients of q, k and v; `tensors` are these and the result."""
    dy, q, k, v, y = (x.transpose(1, 2) for x in (dy, *tensors))
    unread = q.new_empty(2, dtype=torch.uint64)  # the state of dropout
    gradients = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, y, sums, None, None, q.shape[1], k.shape[1], 0.0, True, unread, unread,
        scale=scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip
    return [x.transpose(1, 2) for x in gradients]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: Any, window: int) -> Tensor:
        y, sums = _forward((q, k, v), scale, window)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.how = scale, window
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        *tensors, sums = ctx.saved_tensors
        return *_backward(dy, tensors, sums, *ctx.how), None, None


@contextmanager
def windowed(window: int, *, of_blocks: bool) -> Iterator[None]:
    """Have attention look back at so many tokens, by the kernel of flash attention.

    Args:
        of_blocks: that of vramx's blocks, whose kernels are told; False: torch's function, which
            is replaced. Blocks leave attention to what a program has put in its place.
    """
    from vramx.nn import attention_kernels as kernels

    def attention(q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> Tensor:
        known = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "enable_gqa": True}
        _check(not others and all(named.get(name, known[name]) == known[name] for name in known))
        y: Tensor = _Attention.apply(q, k, v, named.get("scale"), window)
        return y

    # On the host blocks are tried, and found to be what they say, before they are fused.
    own_forward, own_backward = kernels.forward, kernels.backward

    def forward(call: kernels.Call, heads: Any, mask: Any) -> Any:
        if call.kernel == kernels.HOST:
            return own_forward(call, heads, mask)
        _check(call.kernel == kernels.FLASH and call.causal and mask is None and not call.dropout_p)
        return *_forward(heads, call.scale, window), None, None

    def backward(call: kernels.Call, dy: Tensor, tensors: Any, mask: Any, state: Any) -> Any:
        if call.kernel == kernels.HOST:
            return own_backward(call, dy, tensors, mask, state)
        return _backward(dy, tensors, state[0], call.scale, window)

    replaced = mock.patch.object(functional, "scaled_dot_product_attention", attention)
    if of_blocks:
        replaced = mock.patch.multiple(kernels, forward=forward, backward=backward)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with replaced:
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def _check(is_served: bool) -> None:
    if not is_served:
        raise RuntimeError("only causal attention without mask and dropout has a window here")
