"""What the record of a block's forward computes, followed with numbers in place of elements.

Views are compared with what they should be, whatever they are written with, and each operation has
to be one that is known, in its place:

    s = x + f(linear(attention(norm(x))))
    y = s + f(linear(f(activation(linear(norm(s))))))

f is a dropout, or any modules without parts, as scales and stochastic depths are, or nothing; the
norms and the activation may be such modules too. Attention is torch's function, or its product,
softmax and product, with a table of what is later for a mask. All else is named and not read.
Nothing is computed on the block's device; such tables are read from it. No other state.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils._python_dispatch import _disable_current_modes

from vramx.nn.families.plain_plan import (
    Attention,
    Heads,
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
_NEVER = -1e9  # or less, in scores, is a chance of nothing
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


class _Reader:
    """Says what each operation makes, of activations of (rows, tokens, ...)."""

    def __init__(self, module: nn.Module, lead: tuple[int, int]) -> None:
        self._module = module
        self._lead = lead
        self._nothing: list[str] = []
        self._tables: list[str] = []
        self._projections: list[str] = []
        self._stages: list[Stage] = []

    def fresh(self, stage: Stage, width: int) -> Value:
        """Return all elements of a stage, in order."""
        rows, tokens = self._lead
        stage.size = rows * tokens * width
        self._stages.append(stage)
        return Value(stage, torch.arange(stage.size).view(rows, tokens, width))

    def whole(self, value: Any) -> Stage:
        """Return the stage that a value is, element by element."""
        if not isinstance(value, Value) or value.factor != 1:
            raise NotPlainError("an operation in it is not known there")
        expected = torch.arange(value.index.numel())
        if value.stage.kind == "attended":
            expected = expected.view(value.stage.what[0]).transpose(1, 2).flatten(2)
        else:
            expected = expected.view(*self._lead, -1)
        if value.index.numel() != value.stage.size or not torch.equal(value.index, expected):
            raise NotPlainError("elements are in another order than is known there")
        return value.stage

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
            return _dropped(value, path)
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
            return _dropped(input, float(p))
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

    # Attention.

    def _product_by(self, a: Any, b: Any) -> Any:
        return _scaled(b, a) if isinstance(a, (int, float)) else _scaled(a, b)

    def _quotient(self, a: Any, b: Any) -> Any:
        return _scaled(a, 1 / b if isinstance(b, (int, float)) and b else None)

    def _softmax(self, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        soft = isinstance(input, Scores) and not input.is_soft
        if not soft or dim not in (-1, 3) or dtype is not None:
            raise NotPlainError("it has a softmax that is not known")
        if input.is_causal and not input.fill <= _NEVER:
            raise NotPlainError("its attention has a mask that is not known")
        return replace(input, is_soft=True)

    def _masked(self, input: Any, mask: Any, value: Any) -> Scores:
        """Take scores of what comes later away, if that is what the mask has."""
        tokens = self._lead[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        fits = isinstance(mask, Tensor) and mask.numel() == tokens**2
        fits = fits and mask.shape[-2:] == later.shape and torch.equal(mask.view_as(later), later)
        known = fits and isinstance(value, (int, float))
        if not known or not isinstance(input, Scores) or input.is_soft:
            raise NotPlainError("its attention has a mask that is not known")
        return replace(input, is_causal=True, fill=float(value))

    def _masked_in_place(self, input: Any, mask: Any, value: Any) -> Scores:
        masked = self._masked(input, mask, value)
        input.is_causal, input.fill = True, masked.fill  # for everyone who has it
        return cast(Scores, input)

    def _matmul(self, a: Any, b: Any) -> Any:
        if isinstance(a, Scores) and isinstance(b, Value) and a.is_soft and b.factor == 1:
            return self._attends(a.q, a.k, b, (a.dropout or 0.0, a.is_causal, a.factor))
        four = isinstance(a, Value) and isinstance(b, Value) and a.index.dim() == 4
        if not four or b.index.dim() != 4:
            raise NotPlainError("it multiplies matrices")
        return Scores(a, b.moved(b.index.mT), a.factor * b.factor)

    def _attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Value:  # fmt: skip
        values = (query, key, value)
        if attn_mask is not None:
            raise NotPlainError("its attention has a mask")
        if not all(isinstance(each, Value) and each.factor == 1 for each in values):
            raise NotPlainError("its attention is of something else than projections")
        if not enable_gqa and len({each.index.shape[1] for each in values}) > 1:
            raise NotPlainError("its attention repeats heads")
        how = (float(dropout_p), bool(is_causal), None if scale is None else float(scale))
        return self._attends(*values, how)

    def _attends(self, q: Value, k: Value, v: Value, how: tuple[Any, bool, Any]) -> Value:
        heads = (self._heads(q), self._heads(k), self._heads(v))
        if how[2] is not None and not how[2] > 0:  # kernels share its root between q and k
            raise NotPlainError("its attention has a scale that is not positive")
        sources = [each.stage.inputs[0] for each in (q, k, v)]
        if any(each is not sources[0] for each in sources):
            raise NotPlainError("its attention is of two tensors")
        if heads[0].size != heads[1].size or heads[1][2:] != heads[2][2:]:
            raise NotPlainError("its attention is of another shape")
        rows, tokens = self._lead
        shape = (rows, heads[0].number, tokens, heads[0].size)
        made_of = (sources[0], *dict.fromkeys((q.stage, k.stage, v.stage)))
        stage = Stage("attended", (shape, Attention(heads, *how)), made_of)
        stage.size = torch.Size(shape).numel()
        self._stages.append(stage)
        return Value(stage, torch.arange(stage.size).view(shape))

    def _heads(self, value: Value) -> Heads:
        """Return which elements of a projection these are, as (rows, heads, tokens, size)."""
        stage, index = value.stage, value.index
        if stage.kind != "linear" or index.dim() != 4 or not index.numel():
            raise NotPlainError("its attention is of something else than projections")
        _, count, _, size = index.shape
        start = int(index[0, 0, 0, 0])
        all_of_it = torch.arange(stage.size).view(*self._lead, -1)
        expected = all_of_it[..., start : start + count * size]
        fits = expected.shape[-1] == count * size
        fits = fits and torch.equal(index, expected.unflatten(-1, (count, size)).transpose(1, 2))
        if not fits:
            raise NotPlainError("its heads are in another order")
        if stage.what not in self._projections:
            self._projections.append(stage.what)
        return Heads(self._projections.index(stage.what), start, count, size)

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


def _scaled(value: Any, factor: Any) -> Any:
    if not isinstance(factor, (int, float)):
        raise NotPlainError("it multiplies tensors")
    if isinstance(value, Scores) and value.is_soft:
        raise NotPlainError("it scales chances")
    if isinstance(value, Scores):
        value = replace(value, fill=value.fill * float(factor))
    return replace(value, factor=value.factor * float(factor))


def _dropped(scores: Scores, dropout: str | float) -> Scores:
    if not scores.is_soft or scores.dropout is not None:
        raise NotPlainError("it drops scores")
    return replace(scores, dropout=dropout)
