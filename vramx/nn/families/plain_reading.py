"""What a block computes that no family names, read from a trace of its forward.

torch.fx records the forward once, for tensors of any size: what asks a tensor for its numbers, or
takes another way by a shape, cannot be recorded, and is not read; nor is what draws random numbers,
switches gradients, or changes or has what may have a state. plain_following.py then says what the
record computes. Nothing is computed on the block's device, and the block is as it was. Some ten
milliseconds a block; not thread-safe.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression import enclosing
from vramx.nn.families.plain_following import follow
from vramx.nn.families.plain_plan import NotPlainError, Plan, is_linear, is_opaque, is_table
from vramx.nn.families.questions import part_of, untouched
from vramx.patch.module import original_class
from vramx.recompute.generators import Generators, is_generator

_FEWEST_LINEARS, _MOST_LINEARS, _MOST_PARTS = 4, 6, 32
_SIZES = ((2, 3), (3, 5))  # rows and tokens with which a record is followed
_PLAIN = (int, float, bool, str, type(None))
_SETTLED = (
    *(nn.Module, Tensor, type, torch.dtype, torch.device, torch.Size),
    *(FunctionType, BuiltinFunctionType, MethodType),
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)


def may_be_plain(module: nn.Module) -> bool:
    """Tell whether a module may be a block, by the number of its parts and what it takes."""
    parts, waiting, linears = 0, [module], 0
    while waiting and parts <= _MOST_PARTS:
        part = waiting.pop()
        parts += 1
        linears += is_linear(part)
        waiting += () if is_linear(part) else part.children()
    fits = not waiting and _FEWEST_LINEARS <= linears <= _MOST_LINEARS
    return fits and next((p.name for p in _parameters_of(module)), "") == "x"


def read(module: nn.Module) -> Plan:
    """Return what a block computes in training.

    Raises:
        NotPlainError: something else than a Plan says, or nothing that can be read.
    """
    try:
        return _read(module)
    except NotPlainError:
        raise
    except Exception as error:  # whatever a program does with what is no tensor, or has no data
        text = str(error).strip().partition("\n")[0]
        raise NotPlainError(f"its forward cannot be read: {text[:80]}") from None


def _read(module: nn.Module) -> Plan:
    others = _parameters_of(module)[1:]
    if any(p.default is p.empty or p.kind is p.POSITIONAL_ONLY for p in others):
        raise NotPlainError("its forward takes more than x")
    for part in module.modules():
        is_called = type(part).forward is not nn.Module.forward
        if original_class(part) is not type(part) or (is_called and not untouched(part)):
            raise NotPlainError(f"its {type(part).__name__} has hooks or another forward")
        for name, value in () if is_linear(part) else _own_attributes(part):
            if not _is_known(value):
                found = f"its {type(part).__name__} has {name}, which may have a state"
                raise NotPlainError(found)
    graph, through = _traced(module)
    plans = [follow(graph, module, *sizes) for sizes in _SIZES]
    if repr(plans[0]) != repr(plans[1]):
        raise NotPlainError("what it computes depends on the shape")
    constants = tuple(each for path in through for each in _constants_of(module, path))
    defaults = {p.name: p.default for p in others}
    return plans[0]._replace(through=through, constants=constants, defaults=defaults)


def is_as_read(module: Any, plan: Plan) -> bool:
    """Tell whether the parts that were read have no hooks, and attributes are what they were.

    In a graph it is asked once, and what it reads is guarded.
    """
    for path, known in plan.constants:
        part = part_of(module, path)
        if isinstance(part, nn.Module) and not (part.training and (not path or untouched(part))):
            return False
        for name, value in known:
            if getattr(part, name, None) != value:
                return False
    if not _has_tables(module, plan.tables):
        return False
    named: dict[str, type] = dict.fromkeys(plan.nothing, nn.Identity)
    if isinstance(plan.attention.dropout, str):
        named[plan.attention.dropout] = nn.Dropout
    for path, cls in named.items():
        part = part_of(module, path)
        if type(part) is not cls or not untouched(part):
            return False
    return True


def _has_tables(module: Any, paths: tuple[str, ...]) -> bool:
    if torch.compiler.is_compiling():  # which cannot look at them
        return True
    return all(is_table(part_of(module, path)) for path in paths)


def _parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(type(module).forward).parameters.values())[1:]


def _own_attributes(part: Any) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in part.__dict__.items() if k not in _OF_EVERY_MODULE]


def _is_known(value: Any, depth: int = 3) -> bool:
    """Tell whether an attribute is of a kind that nothing moves in: settings, and modules."""
    if isinstance(value, _SETTLED) or type(value) in _PLAIN:
        return True
    held: Any = None
    if type(value) in (list, tuple, set):
        held = value
    elif type(value) is dict:
        held = value.values()
    elif not is_generator(value):
        held = getattr(value, "__dict__", None)  # of a config
        held = None if held is None else held.values()
    return depth > 0 and held is not None and all(_is_known(each, depth - 1) for each in held)


def _constants_of(module: Any, path: str) -> Iterator[tuple[str, tuple[tuple[str, Any], ...]]]:
    """Yield the plain attributes of a module, and of objects in its attributes, as of a config."""
    found = _own_attributes(part_of(module, path))
    yield path, _plain_among(found)
    for name, held in found:
        within = _plain_among(getattr(held, "__dict__", {}).items())
        if within and not isinstance(held, _SETTLED):
            yield f"{path}.{name}".lstrip("."), within


def _plain_among(attributes: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Return those that are numbers, words or lists of such, as they are now."""
    found = []
    for name, value in attributes:
        several = type(value) in (list, tuple) and all(type(each) in _PLAIN for each in value)
        if several or type(value) in _PLAIN:
            found.append((name, value[:] if several else value))
    return tuple(found)


# -- The record ------------------------------------------------------------------------------------


class _Caller(nn.Module):
    """Calls a block with x alone; it gets the constants that a trace makes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


def _traced(module: nn.Module) -> tuple[Any, tuple[str, ...]]:
    """Return the graph of a call in training, and the paths of the modules it went through."""
    from torch import fx

    through: dict[str, None] = {}

    class Proxy(fx.Proxy):
        """Records what is written in place, which torch.fx takes for an operation without."""

    for name in _IN_PLACE:
        setattr(Proxy, f"__{name}__", _recorded(getattr(operator, name)))

    class Tracer(fx.Tracer):
        proxy_buffer_attributes = True

        def proxy(self, node: Any) -> Any:
            return Proxy(node, self)

        def create_node(self, *args: Any, **kwargs: Any) -> Any:
            if _modes() != modes:
                raise NotPlainError("it switches gradients or autocast, or is checkpointed")
            return super().create_node(*args, **kwargs)

        def is_leaf_module(self, m: nn.Module, path: str) -> bool:
            leaf = is_linear(m) or super().is_leaf_module(m, path)
            leaf = leaf or (is_opaque(m) and not _is_layer_norm(m))
            if not leaf:
                through[path.partition(".")[2]] = None
            return leaf

    modes = _modes()
    held = [value for part in module.modules() for value in part.__dict__.values()]
    held += [torch.default_generator, *torch.cuda.default_generators]
    generators = Generators((type(module).forward,), list(module.modules()), held)
    with _unchanged(module), generators.restored():
        graph = Tracer().trace(_Caller(module))
        if generators.have_drawn():
            raise NotPlainError("it draws random numbers")
    return graph, tuple(through)


def _modes() -> tuple[Any, ...]:
    kinds = ("cuda", "cpu")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    saved = (enclosing.in_checkpoint(), enclosing.top_hook())
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *saved, *autocast


def _recorded(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda proxy, other: proxy.tracer.create_proxy(
        "call_function", function, (proxy, other), {}
    )


def _is_layer_norm(module: nn.Module) -> bool:
    """Tell whether a module calls torch's layer norm, and no other function."""
    from torch import fx

    try:
        graph = fx.Tracer().trace(_Caller(module))
    except Exception:  # of what is no tensor: then it is called as it is
        return False
    called = [n.target for n in graph.nodes if n.op in ("call_function", "call_method")]
    return [each for each in called if each is not getattr] == [F.layer_norm]


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Have a module train, and as it was afterwards; one that a call changes is not read.

    Raises:
        NotPlainError: a call gives it another attribute, or changes a list or a dictionary.
    """
    before = [(part, _State(part)) for part in module.modules()]
    for part, _ in before:
        part.training = True
    try:
        yield
    finally:
        changed = [state.put_back(part) for part, state in before]
    if any(changed):
        raise NotPlainError("a call of it changes its attributes")


class _State:
    """A module's attributes, and what lists and dictionaries among them have."""

    def __init__(self, part: nn.Module) -> None:
        self.attributes = dict(part.__dict__)
        held = [value for value in self.attributes.values() if type(value) in (dict, list)]
        self.contents = [(value, _content_of(value)) for value in held]

    def put_back(self, part: nn.Module) -> bool:
        """Give a module what it had; return whether it had anything else."""
        part.training = self.attributes["training"]
        changed = _differs(part.__dict__, self.attributes)
        part.__dict__.clear()
        part.__dict__.update(self.attributes)
        for container, content in self.contents:
            if _differs(_content_of(container), content):
                changed = True
                container.clear()
                if isinstance(container, list):
                    container.extend(content.values())
                else:
                    container.update(content)
        return changed


def _content_of(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _differs(found: dict[Any, Any], known: dict[Any, Any]) -> bool:
    return found.keys() != known.keys() or any(found[name] is not known[name] for name in known)
