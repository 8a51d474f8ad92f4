"""Operations whose backward is smooth in what they save; all others keep exact values.

A small error of a saved value gives a small error of the gradient, unbiased where it is linear,
only where backward multiplies by it, or puts it through a function whose slope is bounded. Where
backward compares, divides, inverts, takes an exponential, or a period, it may be arbitrarily far
off, or not finite. So an operation of torch is packed only if it is named here (a policy that names
an operation goes before). Formulas: torch's derivatives.yaml; a test holds every operation that
torch's own tests know against this. Pure functions of names and Python numbers, thread-safe; a set
look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

# Backward asks only whether the saved value is above zero: a bit holds all of it.
SIGN_ONLY = frozenset({"relu", "leaky_relu"})
# Saved are what is normalised and statistics of it; backward divides by these.
NORMS = frozenset(
    {
        *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"),
        *("native_layer_norm", "native_group_norm", "native_batch_norm", "fused_rms_norm"),
        *("cudnn_batch_norm", "miopen_batch_norm"),
    }
)

# Not among the products are variances: backward subtracts the mean, of which a packed argument is
# the step's noise away, and what reads them divides by a root of theirs. Nor is lerp: the gradient
# of its weight is the difference of its ends, which may be next to each other.
# Products element by element, of tensors that may be expanded to each other.
FACTORS = frozenset({"mul", "multiply", "addcmul"})
# The noise of dropout: zeros and one other number.
_NOISE = frozenset(
    {
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "native_dropout"),
        *("feature_dropout", "feature_alpha_dropout"),
    }
)
# Products whose gradient adds up rows of a factor, or hands them on to what does.
ROW_SUMS = FACTORS | frozenset(
    {
        *("square", "pow", "matmul", "mm", "bmm", "mv", "dot"),
        *("vdot", "inner", "outer", "ger", "addmm", "addmv", "addr", "addbmm", "baddbmm", "kron"),
        *("einsum", "tensordot", "chain_matmul", "cross", "linear", "bilinear", "embedding_bag"),
        *("linalg_matmul", "linalg_multi_dot", "linalg_vecdot", "linalg_cross", "grouped_mm"),
        *("sparse_mm", "spmm", "sparse_sampled_addmm", "conv_tbc", "convolution"),
        *(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)),
    }
)
PRODUCTS = (ROW_SUMS | _NOISE) - {"pow"}  # which depends on its exponent
# Their slopes change by about as much as their argument, or their result, where that is saved. Of
# attention, policy says which of the tensors.
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "lstm_cell", "gru_cell", "rnn_tanh_cell"})
SMOOTH = RECURRENT | frozenset(
    {
        *("sigmoid", "tanh", "tanhshrink", "gelu", "silu", "mish"),
        "scaled_dot_product_attention",
    }
)
# Saved for its size; backward goes by indices, or by nothing.
SIZE_ONLY = frozenset(
    {
        *("gather", "take", "take_along_dim", "index_select", "index_add", "index_copy", "pad"),
        *("interpolate", "upsample", "cummax", "cummin", "put", "getitem", "scatter_add"),
        *(
            f"{kind}_pool{dims}d{indices}"
            for kind in ("avg", "max", "adaptive_avg", "adaptive_max", "fractional_max")
            for dims in (1, 2, 3)
            for indices in ("", "_with_indices")
        ),
    }
)
_PACKED = PRODUCTS | SMOOTH | SIZE_ONLY | NORMS
# Powers whose slope is a product; between, and below 1, it has a root or a pole at zero.
POWERS = frozenset({1, 2, 3, 4})
# At 1, the slope does not jump and changes by no more than the argument does.
_UNIT = {"elu": "alpha", "celu": "alpha", "softplus": "beta"}
# Sums need no values; products divide, and the largest is compared with its arguments.
_REDUCE = frozenset({"scatter_reduce", "index_reduce"})
_SUMS = frozenset({"sum", "mean"})


def needs_exact(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation of torch keeps exact values unless a policy names it.

    Example:
        >>> needs_exact("div", (), {}), needs_exact("gelu", (), {}), needs_exact("l1_loss", (), {})
        (True, False, True)
    """
    if name in _PACKED:
        return False
    if name == "pow":
        exponent = _argument(args, kwargs, 1, "exponent")
        return not isinstance(exponent, (int, float)) or exponent not in POWERS
    if name in _UNIT:
        return bool(_argument(args, kwargs, 1, _UNIT[name], 1.0) != 1.0)
    if name in _REDUCE:
        return _argument(args, kwargs, 4, "reduce") not in _SUMS
    return True


def norm_length(name: str, option: Callable[[int, str, Any], Any]) -> int:
    """Return how many elements in a row a norm divides by one root mean square; 0: other norms.

    `option` gives an argument by position and name.

    Example:
        >>> norm_length("rms_norm", lambda *_: (8,)), norm_length("layer_norm", lambda *_: (8,))
        (8, 0)
    """
    return prod(option(1, "normalized_shape", ())) if name in _OF_SQUARES else 0


_OF_SQUARES = frozenset({"rms_norm", "fused_rms_norm"})


def _argument(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None
) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
