"""A record of what a block's forward does with tensors, by torch.fx, and what a record cannot show.

torch.fx calls the forward with what stands for a tensor. That is not a tensor: what asks what it
is, or for what no plain block needs of one, goes another way than it would, and is not recorded,
though the program may catch the error. The block is as it was afterwards. Not thread-safe.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils import checkpoint

from vramx.compression import enclosing
from vramx.nn.families.plain_code import Steps, code_key
from vramx.nn.families.plain_following import ASKED
from vramx.nn.families.plain_plan import NotPlainError, is_linear, is_opaque
from vramx.recompute.generators import Generators

_IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)
_OTHERS = frozenset(("torch", "vramx", *sys.stdlib_module_names)) - {"__main__"}
_SWITCHES = "it switches gradients or autocast, or is checkpointed"
_PATCHER = "CURRENT_PATCHER"  # what undoes what torch.fx has put in the place of functions
_OF_TRACES = (_PATCHER, "_is_fx_tracing_flag")  # it notes there that it traces
_DEEPEST = 6  # containers in containers, and in attributes of objects in them


class _Caller(nn.Module):
    """Calls a block with x alone; it gets the constants that a trace makes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


class _OfOneThread:
    """A part of a tracer: torch.fx changes the calls of modules in all threads."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)  # type: ignore[misc]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)  # type: ignore[misc]


class Record(NamedTuple):
    """The graph of a call in training, the paths of the modules it went through, and its steps."""

    graph: Any
    through: tuple[str, ...]
    steps: Steps


def traced(module: nn.Module) -> Record:
    """Record a call in training.

    Raises:
        NotPlainError: the call does what such a graph does not say.
    """
    from torch import fx

    through: dict[str, None] = {}
    is_over = False
    failures: list[str] = []  # no errors: these have the frames, of which one has this list

    def failed(said: str) -> NotPlainError:
        failures.append(said)
        return NotPlainError(said)

    class Tracer(_OfOneThread, fx.Tracer):
        proxy_buffer_attributes = True
        stand_in = _stand_in(failed, lambda: is_over)

        def proxy(self, node: Any) -> Any:
            return self.stand_in(node, self)

        def create_node(self, *args: Any, **kwargs: Any) -> Any:
            if _modes() != modes:
                raise failed(_SWITCHES)
            return super().create_node(*args, **kwargs)

        def to_bool(self, obj: Any) -> bool:  # noqa: ARG002 - fx gives it
            raise failed("its forward cannot be read: it depends on a shape or a value")

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
    with _unchanged(module), generators.restored(), _not_checkpointed(failed):
        try:
            with _called_as_before(), _watched() as steps:
                graph = Tracer().trace(_Caller(module))
        finally:
            is_over = True
            if failures:
                raise NotPlainError(failures[0])
        if generators.have_drawn():
            raise NotPlainError("it draws random numbers")
    return Record(graph, tuple(through), steps)


@contextmanager
def _called_as_before() -> Iterator[None]:
    """Have modules called as they were, also where an interrupt keeps torch.fx from undoing that.

    What it leaves in their place ends each call of any module in an error, and functions of others
    (math.sqrt, what fx.wrap names) are replaced as well.
    """
    from torch.fx import _symbolic_trace as tracing

    before = {name: vars(tracing)[name] for name in _OF_TRACES if name in vars(tracing)}
    try:
        yield
    finally:
        left = vars(tracing).get(_PATCHER)
        if left is not None and left is not before[_PATCHER]:
            for patch in reversed(left.patches_made):
                with suppress(KeyError):  # it is undone
                    patch.revert()
        vars(tracing).update(before)


@contextmanager
def _not_checkpointed(failed: Callable[[str], NotPlainError]) -> Iterator[None]:
    """Have torch's checkpoint end in an error before it has begun, in this thread.

    Before torch 2.13 it leaves its hooks where they are when the function in it fails, until the
    collector comes by: what is saved meanwhile would be the stand-ins'.
    """
    begin, thread = checkpoint._checkpoint_without_reentrant_generator, threading.get_ident()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return begin(*args, **kwargs)
        raise failed(_SWITCHES)

    with mock.patch.object(checkpoint, begin.__name__, refuse):
        yield


def _stand_in(failed: Callable[[str], NotPlainError], is_over: Callable[[], bool]) -> Any:
    """Return the class of what stands for tensors; `failed` notes an error, also one caught.

    Those that are left when the trace `is_over`, for the collector, say what they are.
    """
    from torch import fx

    class Proxy(fx.Proxy):
        """Records what is written in place, which torch.fx takes for an operation without."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name not in ASKED:
                raise failed(f"it calls or asks for {name}")
            return super().__getattr__(name)

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            # isinstance() asks for it, in a frame that is its caller's.
            asker = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
            if asker == "torch" or is_over():
                return Proxy
            if self.node.op == "placeholder":
                return Tensor
            raise failed("it asks what a tensor is")

    for name in _IN_PLACE:
        setattr(Proxy, f"__{name}__", _recorded(getattr(operator, name)))
    return Proxy


@contextmanager
def _watched() -> Iterator[Steps]:
    """Note which instructions run meanwhile, but for those of torch, Python and this package."""
    steps: Steps = {}

    def enter(frame: FrameType, *_: Any) -> Any:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _OTHERS:
            return None
        run = steps.setdefault(code_key(frame.f_code), set())

        def note(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                run.add(frame.f_lasti)
            return note

        # In this order, and said again, for Python 3.12 and 3.13 to tell of a frame that has begun.
        frame.f_trace_lines, frame.f_trace = False, note
        frame.f_trace_opcodes = True
        sys.settrace(enter)
        return note

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield steps
    finally:
        sys.settrace(before)


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

    class Tracer(_OfOneThread, fx.Tracer):
        pass

    code = getattr(type(module).forward, "__code__", None)
    if "layer_norm" not in getattr(code, "co_names", ()) or module._buffers:
        return False
    try:
        with _called_as_before():
            graph = Tracer().trace(_Caller(module))
    except Exception:  # of what is no tensor: then it is called as it is
        return False
    called = [n.target for n in graph.nodes if n.op in ("call_function", "call_method")]
    return [each for each in called if each is not getattr] == [F.layer_norm]


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Have a module train, and as it was afterwards; one that a call changes is not read.

    Raises:
        NotPlainError: a call gives it another attribute, or changes what its attributes hold.
    """
    parts = list(module.modules())
    before = [(part, part.training) for part in parts]
    held: dict[int, tuple[Any, dict[Any, Any]]] = {}
    for part in parts:
        _hold(part.__dict__, held, _DEEPEST)
        part.training = True
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
        changed = [_put_back(*each) for each in held.values()]
    if any(changed):
        raise NotPlainError("a call of it changes its attributes")


def _hold(container: Any, held: dict[int, tuple[Any, dict[Any, Any]]], depth: int) -> None:
    """Note what a container has, and what containers in it have, or attributes of objects."""
    if id(container) in held or not depth:
        return
    held[id(container)] = container, _content_of(container)
    for value in held[id(container)][1].values():
        inner = value if isinstance(value, (dict, list, set)) else None
        if inner is None and not isinstance(value, (nn.Module, Tensor, type)):
            inner = getattr(value, "__dict__", None)
        if isinstance(inner, (dict, list, set)):
            _hold(inner, held, depth - 1)


def _put_back(container: Any, content: dict[Any, Any]) -> bool:
    """Give a container what it had; return whether it had anything else."""
    found = _content_of(container)
    if found.keys() == content.keys() and all(found[k] is content[k] for k in content):
        return False
    container.clear()
    if isinstance(container, list):
        container.extend(content.values())
    else:
        container.update(content)
    return True


def _content_of(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return dict(container)
    return dict(enumerate(container)) if isinstance(container, list) else dict.fromkeys(container)
