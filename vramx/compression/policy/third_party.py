"""Which tensors of other libraries' operations backward is linear or smooth in.

A library is the top package of an autograd.Function, or the namespace of an operator. Positions are
those in the call of save_for_backward, None counted as none: an operation that is not listed, or
saves in another order than listed, is kept as it is. Listed is only what its source was read for.
A backward that writes into what it saved (Liger's do) is given memory of its own; see saved.py.
Data, no state.
"""

from __future__ import annotations

# Fused attention: query, key, value, result, logsumexp. Backward needs all of it: an exponential is
# taken of query, key and logsumexp, and value and result must be of each other (see attention.py).
_ATTENTION: frozenset[int] = frozenset()
# Both factors of a gated unit: backward multiplies by them, and by the slope of silu or gelu.
_GATED = frozenset({0, 1})
# Of a norm the input: its statistics are saved beside it, and are what backward divides by.
_NORM = frozenset({0})

PACKED: dict[tuple[str, str], frozenset[int]] = {
    # flash_attn/flash_attn_interface.py, and hopper/flash_attn_interface.py of the third version:
    # save_for_backward(q, k, v, out_padded, softmax_lse, ...).
    ("flash_attn", "FlashAttnFunc"): _ATTENTION,
    ("flash_attn", "FlashAttnVarlenFunc"): _ATTENTION,
    ("flash_attn_interface", "FlashAttnFunc"): _ATTENTION,
    ("flash_attn_interface", "FlashAttnVarlenFunc"): _ATTENTION,
    # xformers/ops/fmha/__init__.py: save_for_backward(query, key, value, out, lse).
    ("xformers", "_fMHA"): _ATTENTION,
    # liger_kernel/ops/swiglu.py and geglu.py: save_for_backward(a, b).
    ("liger_kernel", "LigerSiLUMulFunction"): _GATED,
    ("liger_kernel", "LigerGELUMulFunction"): _GATED,
    # liger_kernel/ops/rms_norm.py: (X, W, RSTD); layer_norm.py: (X, W, B, Mean, RSTD).
    ("liger_kernel", "LigerRMSNormFunction"): _NORM,
    ("liger_kernel", "LigerLayerNormFunction"): _NORM,
    # torchvision/csrc/ops/autograd/deform_conv2d_kernel.cpp: {input, weight, offset, mask, bias}.
    # Linear in the input and the mask; offsets are positions that are rounded. The operators on
    # regions (roi_align, roi_pool, ps_roi_align) save their boxes only, with the number of an image
    # in them, and are kept.
    ("torchvision", "deform_conv2d"): frozenset({0, 3}),
    # bitsandbytes keeps its tensors outside of save_for_backward, where no hook sees them, and PyG
    # computes with torch's operations: neither has an entry.
}
# What our own operators save is packed already, or was to be exact.
OURS = "vramx"


def is_packed(library: str, name: str, position: int) -> bool:
    """Tell whether backward is linear or smooth in what an operation saves at a position.

    Example:
        >>> is_packed("torchvision", "deform_conv2d", 0), is_packed("xformers", "_fMHA", 0)
        (True, False)
    """
    return position in PACKED.get((library, name), ())


def is_known(library: str, name: str) -> bool:
    """Tell whether an operation is torch's or ours, or its source has been read."""
    return library in ("", OURS) or (library, name) in PACKED
