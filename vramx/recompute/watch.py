"""Seeing what a region does: whether small changes of its input make small changes of its result.

Modes on this thread's stacks see every operator of the dispatcher, and functions that read values
without one; the graph tells of autograd.Functions, whose backward may be anything. What these do
not see, such as a kernel that is launched on a pointer, is seen by the memory that it fills. Some
microseconds an operation while a region is watched; nothing waits for the device.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vramx.patch.torch_functions import attention, called
from vramx.recompute.buffers import Buffers
from vramx.recompute.elements import Elements
from vramx.recompute.norms import Readers
from vramx.recompute.origins import Origins
from vramx.recompute.smooth import holds_floats, is_smooth, leaves_unfilled, name_of
from vramx.recompute.structure import flatten
from vramx.recompute.unbounded import Unbounded
from vramx.recompute.verdicts import Verdict

# Ours; what torch.library makes for an operator, which the dispatcher shows itself; and FSDP2's,
# which gives what it is given.
_KNOWN_FUNCTIONS = (
    *("_Rotation", "_Attach", "GeneratedBackwardFor_", "RegisterPostBackwardFunction"),
)
_READS = frozenset(
    getattr(Tensor, name)
    for name in ("tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "__dlpack__")
)
_STATISTICS = ("running_mean", "running_var")
_UNSEEN = "memory that no operation of torch fills"


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, as its schema has it.

    Schemas of batch norms do not say that statistics are written in training, nor do versions.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or not (schema.is_mutable or "batch_norm" in schema.name):
        return []
    given = {each.name: value for each, value in zip(schema.arguments, args, strict=False)}
    given.update(kwargs)
    statistics = _STATISTICS if given.get("training", True) else ()
    written = [
        each.name
        for each in schema.arguments
        if (each.alias_info and each.alias_info.is_write) or each.name in statistics
    ]
    return [given[name] for name in written if name in given]


class Operators(TorchDispatchMode):
    """Call `on_rough` with the name of each operation that is not smooth, nor in `allowed`.

    `readers` look at all of them, `buffers` are told what they write to, and `origins` excuse some.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        on_rough: Callable[[str], None],
        allowed: frozenset[str],
        readers: Sequence[Readers | Elements | Unbounded] = (),
        buffers: Buffers | None = None,
        origins: Origins | None = None,
    ) -> None:
        super().__init__()
        self._on_rough = on_rough
        self._allowed = allowed
        self._origins = origins
        self._readers = readers
        self._buffers = buffers
        # Memory that was just made: what fills it comes next, as in dropout, or is not seen.
        self._unfilled: Tensor | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have compiled functions run as they are: passed over once, they would stay so."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # torch asks a fake tensor: no operation
            return func(*args)
        if self._unfilled is not None:
            self._check_filled((*args[:1], *kwargs.values()))
        if not is_smooth(func, args, kwargs):
            self._look_at_rough(func, args, kwargs)
        written = written_by(func, args, kwargs)
        if self._buffers is not None:
            self._buffers.note_read((*args, *kwargs.values()), written)
            if written:
                self._buffers.before_write(written)
        result = func(*args, **kwargs)
        if self._origins is not None:
            self._origins.note(name_of(func), args, kwargs, (result, written))
        for reader in self._readers:
            reader.look_at(name_of(func), (*args, *kwargs.values()), result)
        if self._buffers is not None:
            self._buffers.note_write(written)
        if isinstance(result, Tensor) and leaves_unfilled(func, result):
            self._unfilled = result
        return result

    def _look_at_rough(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name, origins = name_of(func), self._origins
        if name.split("::")[-1] in self._allowed:
            return
        # One of a higher order may reach more than it is given.
        is_plain = getattr(func, "_schema", None) is not None
        if origins is None or not is_plain or not origins.excuses(name, args, kwargs):
            self._on_rough(name)

    def _check_filled(self, targets: Sequence[Any]) -> None:
        unfilled, self._unfilled = self._unfilled, None
        if not any(target is unfilled for target in targets):
            self._on_rough(_UNSEEN)

    def finish(self) -> None:
        """Say that no operation follows."""
        if self._unfilled is not None:
            self._check_filled(())


class Reads(TorchFunctionMode):
    """The same for functions that read the values of a tensor past the dispatcher.

    `elements` are told of attention, which the dispatcher may run as operations of its own.
    """

    def __init__(
        self,
        on_rough: Callable[[str], None],
        elements: Elements | None = None,
        origins: Origins | None = None,
    ) -> None:
        super().__init__()
        self._on_rough = on_rough
        self._elements = elements
        self._origins = origins

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not torch.compiler.is_compiling():
            func = called(func, sys._getframe(1))
            if func in _READS and holds_floats(args):
                self._look_at_read(f"Tensor.{func.__name__}", args)
            elif func is attention and self._elements is not None:
                self._elements.attend(args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look_at_read(self, name: str, args: tuple[Any, ...]) -> None:
        # Of weights, whose memory FSDP lets go of and has again.
        if self._origins is None or not self._origins.excuses(name, args, {}):
            self._on_rough(name)


class _First:
    """The first name that it is told; what tells it holds nothing else of a Watch."""

    name = ""

    def tell(self, name: str) -> None:
        self.name = self.name or name


class Watch:
    """What one run of a region showed, as a verdict on it.

    Operations in `allowed` are smooth, as their user says. Readers look at `inputs`, by number. An
    operation that is not smooth is excused where it does not read the inputs among `leaves`, or is
    part of a norm.
    """

    def __init__(
        self,
        allowed: frozenset[str],
        inputs: Sequence[Tensor] = (),
        buffers: Buffers | None = None,
        leaves: Sequence[Any] = (),
    ) -> None:
        first = _First()
        self._first, self._note = first, first.tell
        self._buffers = buffers
        self._allowed = allowed
        self._readers = Readers(inputs)
        self._elements = Elements(inputs, self._note, allowed)
        self._unbounded = Unbounded(inputs, allowed)
        self._origins = Origins(leaves)

    @property
    def verdict(self) -> Verdict:
        readers, elements = self._readers, self._elements
        exact = elements.exact | self._unbounded.exact
        return Verdict(
            self._first.name, readers.found, elements.rooted, exact,
            self._origins.excused, readers.planes,
        )  # fmt: skip

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch what runs on this thread meanwhile."""
        readers = (self._readers, self._elements, self._unbounded)
        operators = Operators(self._note, self._allowed, readers, self._buffers, self._origins)
        with Reads(self._note, self._elements, self._origins), operators:
            yield
        operators.finish()

    def look_at(self, result: Any, leaves: Sequence[Any]) -> None:
        """Look for autograd.Functions between a region's result and the leaves of its arguments."""
        seen: set[Any] = {leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)} | {None}
        nodes: list[Any] = [leaf.grad_fn for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        self._elements.leave(flatten(result)[0])
        if not nodes:
            self._note(f"a result without tensors, {type(result).__name__}")
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                name = type(node).__name__.removesuffix("Backward")
                if name not in self._allowed and not name.startswith(_KNOWN_FUNCTIONS):
                    self._note(f"autograd.Function {name}")
            nodes += [following for following, _ in node.next_functions]
