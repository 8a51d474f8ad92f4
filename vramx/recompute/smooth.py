"""Operations under which a small change of the input makes a small change of result and gradient.

A region may be recomputed from a packed input only if it consists of these. Comparing, choosing,
sorting and rounding do not: the noise of packing flips a choice, and the gradient with it. Nor does
what has a pole, such as a quotient of tensors. The list names what is smooth; all else is not, what
nobody here has heard of included. An operation that takes no floating numbers is exact in any case,
for its arguments can have come from packed ones only through an operation that is not smooth.

Pure functions of a dispatcher's operator and its arguments; a look-up, any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Rule = Callable[[tuple[Any, ...], Mapping[str, Any]], bool]

# Views, copies, and joining and taking apart by positions that are given.
_MOVES = """
    alias as_strided cat chunk clone concat constant_pad_nd contiguous detach diagonal diagonal_copy
    diag_embed expand expand_as expand_copy flatten flip gather hstack index index_add index_copy
    index_put index_select lift_fresh masked_fill masked_scatter masked_select movedim narrow pad
    permute pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape roll rot90
    scatter_add select select_backward select_scatter slice slice_backward slice_scatter split
    split_with_sizes squeeze stack swapaxes t take take_along_dim tile transpose tril triu unbind
    unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze view_as
    view_as_complex view_as_real vstack where im2col col2im _conj _neg_view _reshape_alias
    _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_view real imag resolve_conj
    resolve_neg fill zero zeros_like ones_like full_like rand_like randn_like new_zeros new_ones
    new_full normal uniform exponential
"""
# Linear, products, and sums of them.
_PRODUCTS = """
    add addbmm addcmul addmm addmv addr avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    _adaptive_avg_pool2d _adaptive_avg_pool3d baddbmm bmm conv_transpose1d conv_transpose2d
    conv_transpose3d conv1d conv2d conv3d convolution _convolution convolution_overrideable
    cudnn_convolution cudnn_convolution_transpose mkldnn_convolution cumsum dot einsum embedding
    inner kron lerp linear matmul mean mm mse_loss mul mv neg nll_loss nll_loss_forward
    nll_loss2d_forward outer rsub square sub sum trace upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d vdot _mkldnn_linear mkldnn_linear _trilinear _grouped_mm
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d grid_sampler_zeros
"""
# Functions with slopes that are bounded and change slowly; norms and softmax among them. Roots and
# variances are here as parts of norms.
_SLOPES = """
    binary_cross_entropy_with_logits cos erf gelu glu log_sigmoid log_sigmoid_forward logsumexp mish
    rsqrt sigmoid silu sin softplus special_expit sqrt std std_mean tanh var var_mean
    softmax _softmax log_softmax _log_softmax _safe_softmax _masked_softmax
    layer_norm native_layer_norm group_norm native_group_norm rms_norm _fused_rms_norm
    batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_with_update
    _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_no_update
    scaled_dot_product_attention _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _flash_attention_forward
    _efficient_attention_forward _cudnn_attention_forward
"""
# Their noise comes from the generator, whose state a checkpoint restores.
_DROPOUT = "dropout native_dropout _fused_dropout feature_dropout alpha_dropout"
_OTHERS = frozenset({"flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"})
_SMOOTH = (
    frozenset(
        f"aten::{name}" for text in (_MOVES, _PRODUCTS, _SLOPES, _DROPOUT) for name in text.split()
    )
    | _OTHERS
)
# Memory without values: what writes them may be a kernel that no dispatcher sees.
_UNFILLED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"),
        "new_empty_strided",
    )
)
# What our own operators call the activations that are smooth.
_SMOOTH_WORDS = frozenset({"none", "silu", "gelu", "gelu_tanh"})


def is_smooth(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of the dispatcher is smooth in the floating numbers that it takes.

    Example:
        >>> x = torch.ones(2)
        >>> is_smooth(torch.ops.aten.gelu.default, (x,), {})
        True
        >>> is_smooth(torch.ops.aten.relu.default, (x,), {})
        False
        >>> is_smooth(torch.ops.aten.ge.Scalar, (torch.arange(2), 1), {})
        True
    """
    rule = _RULES.get(operator)
    if rule is None:
        rule = _RULES.setdefault(operator, _rule_of(operator))
    return rule is _always or rule(args, kwargs)


def leaves_unfilled(operator: Any, result: Any) -> bool:
    """Tell whether an operator gave memory that something else has yet to fill."""
    return name_of(operator) in _UNFILLED and result.numel() > 0


def name_of(operator: Any) -> str:
    """Return an operator's name without its overload and without the mark of a change in place."""
    schema = getattr(operator, "_schema", None)
    name: str = str(operator) if schema is None else schema.name
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def holds_floats(values: Iterable[Any]) -> bool:
    """Tell whether a tensor among arguments, or in their lists, has floating or complex numbers."""
    return any(
        isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        for leaf in tree_leaves(list(values))
    )


def _rule_of(operator: Any) -> Rule:
    name, overload = name_of(operator), getattr(operator, "_overloadname", "")
    if name.startswith("vramx::"):
        return _has_smooth_activation if name != "vramx::relu" else _takes_no_floats
    return _SPECIAL.get(f"{name}.{overload}") or _SPECIAL.get(name) or _default_rule(name)


def _default_rule(name: str) -> Rule:
    return _always if name in _SMOOTH or name in _UNFILLED else _takes_no_floats


def _always(_args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> bool:
    return True


def _takes_no_floats(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return not holds_floats((*args, *kwargs.values()))


def _has_smooth_activation(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> bool:
    return all(word in _SMOOTH_WORDS for word in args if isinstance(word, str))


def _is_cast_to_floats(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """To another device, or to 8 bits: it is read, or rounded."""
    source = args[0]
    dtype, device = kwargs.get("dtype") or source.dtype, kwargs.get("device")
    here = device is None or _same_device(torch.device(device), source.device)
    rounds = not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2
    return _takes_no_floats(args, {}) or (here and not rounds)


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index is None or one.index == other.index)


def _copies_floats(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> bool:
    target, source = args[:2]
    as_cast = {"dtype": target.dtype, "device": target.device}
    return not isinstance(source, Tensor) or _is_cast_to_floats((source,), as_cast)


def _divides_by_a_number(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("rounding_mode") is not None:
        return _takes_no_floats(args, {})
    return not isinstance(args[1], Tensor) or not holds_floats(args[1:])


def _has_whole_exponent(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> bool:
    return isinstance(args[1], (int, float)) and args[1] in (1, 2, 3, 4)


def _is_of_squares(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> bool:
    return len(args) < 2 or args[1] in (None, 2)


def _has_no_tensor_of_chances(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return not holds_floats((*args[1:], *kwargs.values()))


# Where the overload, or an argument, decides: by name, or by name and overload.
_SPECIAL: dict[str, Rule] = {
    "aten::_to_copy": _is_cast_to_floats,
    "aten::copy": _copies_floats,
    "aten::view": _always,
    "aten::view.dtype": _takes_no_floats,  # bits of floating numbers as integers
    "aten::div": _divides_by_a_number,
    "aten::linalg_vector_norm": _is_of_squares,
    "aten::norm": _is_of_squares,
    "aten::pow.Tensor_Scalar": _has_whole_exponent,
    "aten::bernoulli.default": _takes_no_floats,  # its argument has the chances
    "aten::bernoulli.p": _always,
    "aten::bernoulli.float": _always,
    "aten::bernoulli.Tensor": _has_no_tensor_of_chances,
    "aten::normal.float_Tensor": _takes_no_floats,
    "aten::scatter.src": _always,
    "aten::scatter.value": _always,
}
_RULES: dict[Any, Rule] = {}
