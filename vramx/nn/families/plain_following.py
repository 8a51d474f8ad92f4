"""What the record of a block's forward computes, followed with numbers in place of elements.

Views are compared with what they should be, whatever they are written with, and each operation has
to be one that is known, in its place:

    s = x + f(linear(attention(norm(x))))
    y = s + f(linear(f(activation(linear(norm(s))))))

f is a dropout, or any modules without parts, as scales and stochastic depths are, or nothing; the
norms and the activation may be such modules too; plain_attention.py reads attention. All else is
named and not read. Nothing is computed on the block's device; tables, as of masks, are read from
it. No other state.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils._python_dispatch import _disable_current_modes

from vramx.nn.families.plain_attention import AttentionReader, dropped, scaled
from vramx.nn.families.plain_plan import (
    Norm,
    NotPlainError,
    Plan,
    is_linear,
    is_opaque,
    is_table,
    table_of,
)
from vramx.nn.families.plain_stages import (
    AFTER,
    CALLED,
    Parameter,
    Scores,
    Stage,
    Value,
    behind,
    expect,
    norm_of,
    residual,
    used_in,
)
from vramx.nn.families.questions import part_of

_NORMS = (nn.LayerNorm, nn.RMSNorm)
_ACTIVATIONS = (
    *(nn.GELU, nn.SiLU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid),
)
_AS_MODULES: dict[Any, Callable[..., nn.Module]] = {
    F.gelu: nn.GELU,
    F.silu: nn.SiLU,
    F.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    torch.tanh: nn.Tanh,
}
# What moves elements, and what asks for shapes: a tensor's methods, and torch's functions.
_MOVES = frozenset(
    (
        *("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten"),
        *("split", "chunk", "unbind", "swapaxes", "swapdims", "movedim", "narrow", "select"),
    )
)
_SHAPES = frozenset(("size", "dim"))
# What may be done with tables, which no record follows: nothing random, and nothing in place.
_OF_TABLES = frozenset(
    (
        *("eq", "ne", "lt", "gt", "le", "ge", "logical_not", "bitwise_not", "invert", "inv"),
        *("bool", "to", "float", "getitem", "squeeze", "unsqueeze", "expand", "sub", "rsub"),
    )
)
_OF_NUMBERS = ("_operator", "builtins", "math", "torch")


def follow(graph: Any, module: nn.Module, rows: int, tokens: int) -> Plan:
    """Return what a record of torch.fx computes of a tensor (rows, tokens, size).

    The record is of a module whose only part is the block.

    Raises:
        NotPlainError: something else than a Plan says.
    """
    with _disable_current_modes():  # the numbers are real, in a prediction as well
        return _followed(graph, module, rows, tokens)


def _followed(graph: Any, module: nn.Module, rows: int, tokens: int) -> Plan:
    from torch.fx.node import map_arg

    reader, found = _Reader(module, (rows, tokens)), dict[Any, Any]()
    x = Stage("x")
    for node in graph.nodes:
        args, kwargs = (map_arg(each, found.__getitem__) for each in (node.args, node.kwargs))
        target = _inner(node.target)
        if node.op == "placeholder":
            found[node] = reader.fresh(x, _width(graph, module))
        elif node.op == "get_attr":
            found[node] = reader.attribute(target)
        elif node.op == "call_module":
            found[node] = reader.called(target, *args, **kwargs)
        elif node.op == "call_function":
            found[node] = reader.function(node.target, args, kwargs)
        elif node.op == "call_method":
            found[node] = reader.method(node.target, args, kwargs)
        elif node.op == "output":
            return reader.plan(reader.whole(args[0]), x)
    raise NotPlainError("it returns nothing")


def _inner(target: Any) -> str:
    """Return a path in the block, of one in what calls it."""
    return str(target).partition(".")[2]


def _width(graph: Any, module: nn.Module) -> int:
    """Return the size of x, which is that of the first weight that is used."""
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            part = part_of(module, _inner(node.target))
            shapes = [getattr(part, name, None) for name in ("normalized_shape", "shape")]
            width = next((each[-1] for each in shapes if each), getattr(part, "in_features", None))
            if isinstance(width, int):
                return width
    raise NotPlainError("it has no norm")


class _Reader(AttentionReader):
    """Says what each operation makes."""

    def __init__(self, module: nn.Module, lead: tuple[int, int]) -> None:
        super().__init__(lead)
        self._module = module
        self._nothing: list[str] = []
        self._tables: list[str] = []

    def attribute(self, path: str) -> Parameter | Tensor:
        found = part_of(self._module, path)
        if isinstance(found, nn.Parameter):
            return Parameter(path, found.shape)
        if not is_table(found):
            raise NotPlainError(f"it uses {path}")
        self._tables.append(path)
        return table_of(found)

    def _after(self, kind: str, what: Any, value: Value) -> Value:
        """Return what an operation that keeps the shape makes of all of a value."""
        return self.fresh(Stage(kind, what, (self.whole(value),)), value.width)

    # Modules.

    def called(self, path: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        part: Any = part_of(self._module, path)
        if args or kwargs:
            raise NotPlainError(f"its {path} takes more than one argument")
        if type(part) is nn.Identity:
            self._nothing.append(path)
            return value
        if isinstance(value, Scores) and type(part) is nn.Dropout:
            return dropped(value, path)
        if not isinstance(value, Value):
            raise NotPlainError(f"its {path} is of something else than a tensor")
        if is_linear(part) and getattr(part, "in_features", None) == value.width:
            return self.fresh(Stage("linear", path, (self.whole(value),)), int(part.out_features))
        if type(part) in _NORMS and tuple(part.normalized_shape) == (value.width,):
            return self._after("norm", Norm(path), value)
        kinds = {nn.Dropout: "dropout", **dict.fromkeys(_ACTIVATIONS, "activation")}
        kind = kinds.get(type(part), CALLED if is_opaque(part) else None)
        if kind is None or getattr(part, "inplace", False):
            raise NotPlainError(f"its {path} is a {type(part).__name__}")
        return self._after(kind, path, value)

    # Functions and methods.

    def function(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if target is getattr and isinstance(first, (Value, Parameter)):
            return self._attribute(first, args[1])
        if target is operator.getitem and isinstance(first, Value):
            return first.moved(first.index[args[1]])
        name = getattr(target, "__name__", str(target))
        if not any(_is_followed(each) for each in (*args, *kwargs.values())):
            _check_unfollowed(name, args, kwargs)
            if getattr(target, "__module__", None) not in _OF_NUMBERS:
                raise NotPlainError(f"it calls {name}")
            return target(*args, **kwargs)  # of numbers and shapes
        if target in _AS_MODULES and isinstance(first, Value):
            part = _AS_MODULES[target](*args[1:], **{k: v for k, v in kwargs.items() if v})
            if getattr(part, "inplace", False):
                raise NotPlainError("it writes into a tensor")
            return self._after("activation", part, first)
        if name in _MOVES and getattr(torch, name, None) is target:
            return self.method(name, args, kwargs)
        known = _KNOWN.get(target)
        if known is None:
            raise NotPlainError(f"it calls {name}")
        return self._known(known, name, args, kwargs)

    def method(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        value, rest = args[0], args[1:]
        if not _is_followed(value):
            _check_unfollowed(name, args, kwargs)
            return getattr(value, name)(*rest, **kwargs)
        if name in _SHAPES and isinstance(value, (Value, Parameter)):
            shape = value.index.shape if isinstance(value, Value) else value.shape
            return getattr(torch.empty(shape, device="meta"), name)(*rest, **kwargs)
        if name in _MOVES and isinstance(value, Value):
            moved = getattr(value.index, name)(*rest, **kwargs)
            is_one = isinstance(moved, Tensor)
            return value.moved(moved) if is_one else tuple(value.moved(each) for each in moved)
        known = _KNOWN_METHODS.get(name)
        if known is None:
            raise NotPlainError(f"it calls {name}")
        return self._known(known, name, args, kwargs)

    def _known(
        self, known: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        try:
            inspect.signature(known).bind(self, *args, **kwargs)
        except TypeError:
            raise NotPlainError(f"it calls {name} in another way") from None
        return known(self, *args, **kwargs)

    def _attribute(self, value: Value | Parameter, name: str) -> Any:
        shape = value.index.shape if isinstance(value, Value) else value.shape
        if name in ("shape", "ndim"):
            return shape if name == "shape" else len(shape)
        if name == "device":
            return torch.device("cpu")
        if name == "mT" and isinstance(value, Value):
            return value.moved(value.index.mT)
        raise NotPlainError(f"it asks for {name}")

    def _sum(self, a: Any, b: Any) -> Value:
        stage = Stage("add", None, (self.whole(a), self.whole(b)))
        return self.fresh(stage, a.width)

    def _dropout(
        self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or inplace:
            raise NotPlainError("its dropout is of another kind")
        if isinstance(input, Scores):
            return dropped(input, float(p))
        return self._after("dropout", nn.Dropout(p), input)

    def _layer_norm(
        self, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None,
        eps: float = 1e-5,
    ) -> Value:  # fmt: skip
        terms = (weight, bias)
        known = all(each is None or isinstance(each, Parameter) for each in terms)
        self.whole(input)
        if not known or tuple(normalized_shape) != (input.width,):
            raise NotPlainError("its layer norm is of another kind")
        at, of_bias = (None if each is None else each.path for each in terms)
        return self._after("norm", Norm(None, at, of_bias, float(eps)), input)

    def _product_by(self, a: Any, b: Any) -> Any:
        return scaled(b, a) if isinstance(a, (int, float)) else scaled(a, b)

    def _quotient(self, a: Any, b: Any) -> Any:
        return scaled(a, 1 / b if isinstance(b, (int, float)) and b else None)

    # The whole.

    def plan(self, result: Stage, x: Stage) -> Plan:
        """Return the plan of what ends with a result."""
        middle, branch = residual(result)
        first, attended = residual(middle)
        last, outer = behind(branch)
        unit, inner = behind(expect(outer, "linear").inputs[0], "activation", *AFTER)
        after, output = behind(attended)
        attention = expect(expect(output, "linear").inputs[0], "attended")
        norms = [expect(each.inputs[0], "norm", CALLED) for each in (attention, inner)]
        if not unit:
            raise NotPlainError("it has no activation")
        if first is not x or norms[0].inputs[0] is not x or norms[1].inputs[0] is not middle:
            raise NotPlainError("its norms or its sums are of something else")
        if not used_in(result).issuperset(self._stages):
            raise NotPlainError("it computes something that its result is not made of")
        return Plan(
            (norm_of(norms[0]), norm_of(norms[1])), tuple(self._projections), attention.what[1],
            output.what, expect(inner, "linear").what, unit, outer.what, (after, last),
            tuple(dict.fromkeys(self._nothing)), tuple(dict.fromkeys(self._tables)),
        )  # fmt: skip


_KNOWN: dict[Any, Callable[..., Any]] = {
    operator.add: _Reader._sum,
    torch.add: _Reader._sum,
    operator.mul: _Reader._product_by,
    torch.mul: _Reader._product_by,
    operator.truediv: _Reader._quotient,
    torch.div: _Reader._quotient,
    operator.matmul: _Reader._matmul,
    torch.matmul: _Reader._matmul,
    F.dropout: _Reader._dropout,
    F.layer_norm: _Reader._layer_norm,
    F.softmax: _Reader._softmax,
    torch.softmax: _Reader._softmax,
    F.scaled_dot_product_attention: _Reader._attention,
}
_KNOWN_METHODS: dict[str, Callable[..., Any]] = {
    "add": _Reader._sum,
    "mul": _Reader._product_by,
    "div": _Reader._quotient,
    "matmul": _Reader._matmul,
    "softmax": _Reader._softmax,
    "masked_fill": _Reader._masked,
    "masked_fill_": _Reader._masked_in_place,
}


# What a forward may ask of a tensor by name.
ASKED = _MOVES | _SHAPES | _OF_TABLES | _KNOWN_METHODS.keys() | {"shape", "ndim", "device", "mT"}


def _is_followed(value: Any) -> bool:
    return isinstance(value, (Value, Scores, Parameter))


def _check_unfollowed(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse what is done with a table, but for what is known to leave it, and to repeat."""
    of_table = any(isinstance(each, Tensor) for each in (*args, *kwargs.values()))
    if of_table and name not in _OF_TABLES | _MOVES | _SHAPES | {"getattr"}:
        raise NotPlainError(f"it calls {name} of a mask")
