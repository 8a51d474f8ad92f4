"""Operations whose backward needs more of what they save than a small error of it.

The gradient of most operations is smooth in what they save: a small error of one gives a small
error of the other, unbiased where it is linear. Not so where backward compares (a value that rounds
across a threshold gets all or nothing), divides (a value that rounds to zero gives an infinity),
takes an exponential, or inverts a matrix. Those keep exact values by default; a policy that names
one of them goes before. Pure functions of names and Python numbers, thread-safe; a set look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Backward asks only whether the saved value is above zero: a bit holds all of it.
SIGN_ONLY = frozenset({"relu", "leaky_relu"})

_COMPARES = frozenset(
    {
        *("abs", "absolute", "amax", "amin", "aminmax", "max", "min", "maximum", "minimum", "fmax"),
        *("fmin", "clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "relu6", "threshold"),
        *("hardshrink", "softshrink", "hardsigmoid", "hardswish", "prelu", "rrelu", "selu"),
    }
)
_DIVIDES = frozenset(
    {
        *("div", "divide", "truediv", "true_divide", "addcdiv", "sqrt", "log", "log2", "log10"),
        *("log1p", "xlogy", "logaddexp", "logaddexp2", "prod", "cumprod", "atan2", "arctan2"),
        *("hypot", "acos", "asin", "acosh", "atanh", "arccos", "arcsin", "arccosh", "arctanh"),
        *("cdist", "pdist", "dist", "erfinv", "logit", "float_power"),
    }
)
_EXPONENTIAL = frozenset(
    {
        *("softmax", "softmin", "log_softmax", "logsumexp", "logcumsumexp", "gumbel_softmax"),
        *("cross_entropy", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    }
)
_INVERTS = frozenset(
    {
        *("inverse", "pinverse", "cholesky", "cholesky_inverse", "cholesky_solve", "det", "logdet"),
        *("slogdet", "svd", "qr", "lu", "lu_solve", "triangular_solve", "matrix_exp", "lstsq"),
    }
)
_EXACT = _COMPARES | _DIVIDES | _EXPONENTIAL | _INVERTS
# Of linear algebra, what is a product or a norm of two numbers and no more.
_SMOOTH_LINALG = frozenset({"linalg_matmul", "linalg_multi_dot", "linalg_vecdot"})


def needs_exact(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation keeps exact values unless a policy names it.

    Example:
        >>> needs_exact("div", (), {}), needs_exact("gelu", (), {}), needs_exact("l1_loss", (), {})
        (True, False, True)
    """
    if name in _EXACT or name.endswith("_loss"):
        return True
    if name == "pow":
        return _is_singular_power(args, kwargs)
    return name.startswith("linalg_") and name not in _SMOOTH_LINALG


def _is_singular_power(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """x ** p is smooth where p is a number of at least 1; its backward has x ** (p - 1)."""
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    return not isinstance(exponent, (int, float)) or exponent < 1
