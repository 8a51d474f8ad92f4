"""What torch decides in C++ where there is a GPU, decided here for tensors without data.

Which kernel attention runs depends on a GPU: nn/attention_kernels.py has torch's rules, here for
one of compute capability 9.0 where torch prefers flash to cuDNN, which take the same.

torch's own calls on packed sequences read from memory how many rows go on. Each is done by what
needs no data and takes the same memory: packing is a part of the rows. A recurrent layer is given
the known numbers of rows themselves, which it reads as ever. Pure; any thread.
"""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from vramx.compression.fakes import answering
from vramx.nn import attention_kernels
from vramx.patch.torch_functions import attention as torchs_attention
from vramx.planning.fake_values import keep_value, real, value_of

_functions: Any = torch._C._VariableFunctions
_HEAD_MULTIPLE = 8  # elements
_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


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
    q, k, v = padded = tuple(map(_widened, tensors))
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
    return torchs_attention(query, key, value, *options, scale=scale, enable_gqa=enable_gqa)


def _widened(x: Tensor) -> Tensor:
    """Return heads as wide as kernels of attention need them."""
    missing = -x.shape[-1] % _HEAD_MULTIPLE
    return functional.pad(x, (0, missing)) if missing and x.device.type == "cuda" else x


def _packed(x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    if not isinstance(x, FakeTensor):
        return _functions._pack_padded_sequence(x, lengths, batch_first)
    steps, count = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    with real():
        known = value_of(lengths)
        known = torch.full((count,), steps) if known is None else known
        going_on = (known[None] > torch.arange(int(known.max()))[:, None]).sum(1)
        total = int(known.sum())
    sizes = torch.empty(len(going_on), dtype=torch.int64)
    keep_value(sizes, going_on)
    return x.flatten(0, 1)[:total].clone(), sizes  # as many rows, whichever they are


def _padded(
    data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> Any:
    known = value_of(sizes)
    if not isinstance(data, FakeTensor) or known is None:
        return _functions._pad_packed_sequence(data, sizes, batch_first, padding, total_length)
    with real():
        steps, count = len(known), int(known[0])
        found = (known[:, None] > torch.arange(count)[None]).sum(0)
    lengths = torch.empty(count, dtype=torch.int64)
    keep_value(lengths, found)
    rows = _filled(data, max(steps, total_length), count)
    return (rows.transpose(0, 1) if batch_first else rows), lengths


def _filled(data: Tensor, steps: int, count: int) -> Tensor:
    missing = steps * count - data.shape[0]
    filled = functional.pad(data, (0, 0) * (data.dim() - 1) + (0, missing))
    return filled.view(steps, count, *data.shape[1:])


def _recurrent(function: Any) -> Any:
    """Return what runs a recurrent layer, of which packed rows come with their sizes."""

    def run(x: Tensor, *rest: Any) -> Any:
        # Of packed rows there are sizes, then states; of others states, then weights.
        is_packed = isinstance(rest[0], Tensor) and rest[0].dtype == torch.int64
        known = value_of(rest[0]) if is_packed else None
        return function(x, *(rest if known is None else (known, *rest[1:])))

    return run


def _ctc_loss(
    probabilities: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *rest: Any
) -> Any:
    """Have lengths that are tensors, which torch reads on the host, given as numbers."""
    steps = [probabilities.shape[0]] * probabilities.shape[1]
    longest = [targets.shape[-1]] * probabilities.shape[1]
    lengths = _numbers(input_lengths, steps), _numbers(target_lengths, longest)
    return _functions.ctc_loss(probabilities, targets, *lengths, *rest)


def _of_type(x: Tensor, dtype: Any = None, *rest: Any, **kwargs: Any) -> Any:
    """Move a tensor to a type of the time before devices, such as "torch.cuda.FloatTensor"."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None)
    kind = _TYPES.get(str(name).rpartition(".")[2])
    if kind is None:
        return Tensor.type(x, dtype, *rest, **kwargs)
    module = dtype if isinstance(dtype, str) else dtype.__module__
    where = torch.device("cuda", 0) if "cuda" in module else torch.device("cpu")
    return x.to(kind) if x.device.type == where.type else x.to(where, kind)


def _gaussian_nll(*args: Any, **kwargs: Any) -> Any:
    """Leave out the check that no variance is below 0, which reads them."""
    with mock.patch.object(torch, "any", answering(False)):
        return functional.gaussian_nll_loss(*args, **kwargs)


def _numbers(lengths: Any, otherwise: list[int]) -> Any:
    if not isinstance(lengths, FakeTensor):
        return lengths
    known = value_of(lengths)
    with real():
        return otherwise if known is None else known.flatten().tolist()


# A function -> what runs for it on the fake GPU, and on either device.
REPLACED: dict[Any, Any] = {torchs_attention: attention}
SEQUENCES: dict[Any, Any] = {
    _functions._pack_padded_sequence: _packed,
    _functions._pad_packed_sequence: _padded,
    _functions.ctc_loss: _ctc_loss,
    functional.gaussian_nll_loss: _gaussian_nll,
    Tensor.type: _of_type,
    **{
        layer: _recurrent(layer)
        for layer in (
            *(_functions.lstm, _functions.gru),
            *(_functions.rnn_tanh, _functions.rnn_relu),
        )
    },
}
