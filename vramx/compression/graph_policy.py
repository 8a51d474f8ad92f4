"""Which saved nodes of a compiled graph backward needs the exact value of.

The counterpart, for graphs that torch.compile traced and perhaps decomposed, of what policy.py and
exactness.py say about operations in eager code. Pure functions of an fx graph; a few steps from a
node to its users.
"""

from __future__ import annotations

from typing import Any

from torch import fx

# Of what they read, or divide by, an error is multiplied, or flips a choice.
_EXACT = frozenset(
    {
        *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "sqrt"),
        *("le", "lt", "ge", "gt", "eq", "ne", "sign", "sgn"),
        *("_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_backward"),
        *("threshold_backward", "hardtanh_backward", "hardsigmoid_backward", "hardswish_backward"),
        *("leaky_relu_backward", "flex_attention_backward"),
    }
)
# What gives the same data, moved or shifted: a softmax is the exponential of a difference.
_PASSES = frozenset(
    {
        *("_to_copy", "convert_element_type", "view", "_unsafe_view", "reshape", "unsqueeze"),
        *("squeeze", "expand", "permute", "transpose", "t", "clone", "alias", "slice", "select"),
        *("sub", "add", "where"),
    }
)
# Arguments of the backward of attention that an exponential is taken of.
_LOGITS = frozenset({"query", "key", "logsumexp", "softmax_logsumexp"})
_DEPTH = 8


def is_exact(saved: fx.Node) -> bool:
    """Tell whether the backward graph needs a placeholder's exact value."""
    seen, front = {saved}, [saved]
    for _ in range(_DEPTH):
        below = []
        for node in front:
            for user in node.users:
                if _needs_exact(user, node):
                    return True
                if user not in seen and _passes(user):
                    seen.add(user)
                    below.append(user)
        front = below
    return False


def _needs_exact(user: fx.Node, argument: fx.Node) -> bool:
    name = _name(user)
    if name in _EXACT:
        return True
    if name == "div":
        return user.args[1] is argument
    if "scaled_dot_product" in name or "efficient_attention" in name:
        return argument in _arguments(user, _LOGITS)
    return False


def _passes(user: fx.Node) -> bool:
    name = _name(user)
    by_a_number = name in ("mul", "div") and not isinstance(user.args[1], fx.Node)
    return name in _PASSES or by_a_number


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", ""))


def _arguments(node: fx.Node, names: frozenset[str]) -> list[Any]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(node.args)
    positions = {argument.name: i for i, argument in enumerate(schema.arguments)}
    places = [positions[name] for name in names if name in positions]
    return [node.args[i] for i in places if i < len(node.args)]
