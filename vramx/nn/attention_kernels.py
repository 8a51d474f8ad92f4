"""torch's fused attention kernels: which of them takes a call, and how each is called.

    CUDNN      aten._scaled_dot_product_cudnn_attention: as FLASH without dropout, if torch would
    FLASH      aten._scaled_dot_product_flash_attention: CUDA, bfloat16 and float16, no mask
    EFFICIENT  aten._scaled_dot_product_efficient_attention: CUDA, masks, float32
    HOST       aten._scaled_dot_product_flash_attention_for_cpu: no dropout

forward() and backward() give all of them one face: what a kernel wants prepared is done here, as
torch's scaled_dot_product_attention prepares it (aten/src/ATen/native/transformers/attention.cpp):
bool masks become -inf and 0, rows of a mask begin at multiples of 16 elements, and heads of keys
and values are repeated where a kernel does not share them. Pure but for torch's generator, from
which dropout draws; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from vramx.compression.fakes import PLAIN
from vramx.nn.keeping import DTYPES

NO_KERNEL, FLASH, EFFICIENT, HOST, CUDNN = range(5)
_HALVES = (torch.bfloat16, torch.float16)
_MASK_MULTIPLE = 16  # elements, of the rows of a mask in memory
# Of a head, by flash's backward kernel; 192 where an SM has less shared memory than these have.
_LARGEST_HEAD, _LARGEST_HEAD_ELSEWHERE = 256, 192
_LARGE_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
# Of queries and of keys, for cuDNN: it refuses some of the shortest sequences.
_FEWEST_TOKENS = 128


class Call(NamedTuple):
    """What a kernel is told beside its tensors."""

    kernel: int
    dropout_p: float
    causal: bool
    scale: float | None


# -- Which -----------------------------------------------------------------------------------------


def choose(
    tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, call: Call, shares_heads: bool
) -> int:
    """Return the kernel for q, k and v, or NO_KERNEL; that of `call` is not read."""
    q = tensors[0]
    if not _fits(tensors, shares_heads) or not _mask_fits(mask, q, tensors[1], call):
        return NO_KERNEL
    if q.device.type == "cpu":
        return HOST if call.dropout_p == 0 and _flash_allowed() else NO_KERNEL
    if q.device.type != "cuda" or (call.dropout_p > 0 and torch.compiler.is_compiling()):
        return NO_KERNEL
    return _of_cuda(q, tensors[1], mask, call)


def _of_cuda(q: Tensor, k: Tensor, mask: Tensor | None, call: Call) -> int:
    largest, flash, efficient = _allowed(q.device)
    half, size = q.dtype in _HALVES, q.shape[-1]
    square = not call.causal or q.shape[2] == k.shape[2]
    if half and mask is None and size % 8 == 0 and square:
        long = q.shape[2] >= _FEWEST_TOKENS and k.shape[2] >= _FEWEST_TOKENS
        if call.dropout_p == 0 and long and _prefers_cudnn(q.device, q.dtype, size):
            return CUDNN
        if flash and size <= largest:
            return FLASH
    aligned = size % (8 if half else 4) == 0
    return EFFICIENT if efficient and aligned and q.dtype != torch.float64 else NO_KERNEL


def _fits(tensors: tuple[Tensor, Tensor, Tensor], shares_heads: bool) -> bool:
    q, k, v = tensors
    dtype, device = q.dtype, q.device
    for x in tensors:
        if type(x) not in PLAIN or x.dim() != 4 or x.stride(-1) != 1:
            return False
        if x.dtype != dtype or x.device != device:
            return False
    of_q, of_k = q.shape, k.shape
    if of_k != v.shape or 0 in of_q or 0 in of_k or dtype not in DTYPES:
        return False
    of_heads = of_q[1] % of_k[1] == 0 if shares_heads else of_q[1] == of_k[1]
    return of_heads and of_q[0] == of_k[0] and of_q[3] == of_k[3]


def _mask_fits(mask: Tensor | None, q: Tensor, k: Tensor, call: Call) -> bool:
    if mask is None:
        return True
    if call.causal or mask.requires_grad or mask.dtype not in (torch.bool, q.dtype):
        return False
    if not 2 <= mask.dim() <= 4 or mask.device != q.device:
        return False
    full = (*q.shape[:3], k.shape[2])[-mask.dim() :]
    return all(size in (1, most) for size, most in zip(mask.shape, full, strict=True))


@torch.compiler.assume_constant_result
def _flash_allowed() -> bool:
    return bool(torch.backends.cuda.flash_sdp_enabled())


@torch.compiler.assume_constant_result
def _allowed(device: torch.device) -> tuple[int, bool, bool]:
    """Return the largest head of flash, and whether flash and the efficient kernel may run."""
    capability = _capability(device)
    large = capability in _LARGE_CAPABILITIES
    cuda = torch.backends.cuda
    served = capability >= (8, 0)
    flash = served and cuda.flash_sdp_enabled() and cuda.is_flash_attention_available()
    efficient = served and cuda.mem_efficient_sdp_enabled()
    return _LARGEST_HEAD if large else _LARGEST_HEAD_ELSEWHERE, flash, efficient


@torch.compiler.assume_constant_result
def _prefers_cudnn(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Tell whether torch would call cuDNN for heads of a size, as its switches are now."""
    cuda = torch.backends.cuda
    order = getattr(torch._C, "_get_sdp_priority_order", tuple)
    switches = (
        cuda.cudnn_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        tuple(order()),
    )
    return _chooses_cudnn(device, dtype, size, switches)


@lru_cache(maxsize=64)
def _chooses_cudnn(
    device: torch.device, dtype: torch.dtype, size: int, _switches: tuple[object, ...]
) -> bool:
    # Asked for a small call: versions, environment and hardware are in the answer, too.
    shape = (1, _FEWEST_TOKENS, 1, size)
    q, k, v = (
        torch.empty(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, True)
    return bool(chosen == SDPBackend.CUDNN_ATTENTION.value)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    if torch.version.hip is not None:
        return (0, 0)  # other kernels, other limits: not tried
    return torch.cuda.get_device_capability(device)


# -- How -------------------------------------------------------------------------------------------


def forward(
    call: Call, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the result, the logarithm of the sums of exponentials, and the state of dropout.

    That state is two tensors, None without dropout.
    """
    q, k, v = tensors
    if call.kernel == FLASH:
        y, sums, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, call.dropout_p, call.causal, scale=call.scale
        )
    elif call.kernel == CUDNN:
        y, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, call.causal, scale=call.scale
        )
    else:
        k, v = _repeated(k, q), _repeated(v, q)
        mask = prepared_mask(mask, q, k)
    if call.kernel == EFFICIENT:
        y, sums, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, call.dropout_p, call.causal, scale=call.scale
        )
    if call.kernel == HOST:
        y, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, call.causal, attn_mask=mask, scale=call.scale
        )
    if call.dropout_p == 0:
        seed = offset = None
    return y, sums, seed, offset


def backward(
    call: Call,
    dy: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Tensor | None,
    state: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `tensors` are these and the result."""
    q, k, v, y = tensors
    sums, seed, offset = state
    if call.dropout_p == 0:
        # Not read, but declared as tensors.
        seed = offset = q.new_empty(2, dtype=torch.uint64 if call.kernel == FLASH else torch.int64)
    if call.kernel == FLASH:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, y, sums, None, None, q.shape[2], k.shape[2], call.dropout_p, call.causal,
            seed, offset, scale=call.scale,
        )  # fmt: skip
        return dq, dk, dv
    if call.kernel == CUDNN:
        seed = offset = q.new_empty((), dtype=torch.int64)
        # torch keeps what cuDNN planned by the layouts of q, k and v: y and dy must have the layout
        # that they imply, or a plan for other strides would read them.
        dy, y = _laid_out_like(dy, q), _laid_out_like(y, q)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dy, q, k, v, y, sums, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0,
            call.causal, scale=call.scale,
        )  # fmt: skip
        return dq, dk, dv
    mask = prepared_mask(mask, q, k)
    many_k, many_v = _repeated(k, q), _repeated(v, q)
    if call.kernel == EFFICIENT:
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dy, q, many_k, many_v, mask, y, sums, seed, offset, call.dropout_p,
            [True, True, True, False], call.causal, scale=call.scale,
        )  # fmt: skip
    else:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, many_k, many_v, y, sums, 0.0, call.causal, attn_mask=mask, scale=call.scale
        )
    return dq, _summed(dk, k), _summed(dv, v)


def _laid_out_like(x: Tensor, q: Tensor) -> Tensor:
    """Return x dense and in the order of q's dimensions in memory, as the kernel's result is."""
    like = torch.empty_like(q, device="meta")
    return x if x.stride() == like.stride() else torch.empty_like(q).copy_(x)


def in_whole_matrices(
    call: Call, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None
) -> Tensor:
    """Return the result, without dropout, by operations that have derivatives of any order."""
    q, k, v = tensors
    y, _ = torch.ops.aten._scaled_dot_product_attention_math(
        q, k, v, prepared_mask(mask, q, k), 0.0, call.causal, scale=call.scale, enable_gqa=True
    )
    result: Tensor = y
    return result


def prepared_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask to be added, of q's type; for the efficient kernel aligned and expanded.

    Example:
        >>> q = torch.zeros(1, 1, 2, 8)
        >>> prepared_mask(torch.tensor([[True, False]]), q, q)
        tensor([[[[0., -inf]]]])
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    if q.device.type == "cpu":
        return mask
    keys = k.shape[2]
    mask = mask.expand(*mask.shape[:3], keys)
    if any(stride % _MASK_MULTIPLE for stride in mask.stride()[:3]) or mask.stride(3) != 1:
        padded = mask.new_empty(*mask.shape[:3], -(-keys // _MASK_MULTIPLE) * _MASK_MULTIPLE)
        mask = padded[..., :keys].copy_(mask)
    return mask.expand(*q.shape[:3], keys)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x from that of _repeated(x)."""
    if gradient.shape == x.shape:
        return gradient
    total: Tensor = gradient.unflatten(1, (x.shape[1], -1)).sum(2)
    return total
