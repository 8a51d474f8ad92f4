"""One call of an operation that saves tensors, and which of its arguments a saved tensor is.

operations.py finds the call; policy.py decides by it. An Operation lives as long as its call and
belongs to one thread; its arguments are looked at only when something is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from vramx.compression.fakes import PLAIN, is_labelled
from vramx.compression.policy import exactness

# Views and copies that autograd records: what they give is the same data.
_ORDER_KEPT = frozenset(
    f"{name}Backward{version}"
    for name in ("View", "UnsafeView", "_ReshapeAlias", "ReshapeAlias", "T", "Transpose", "Permute")
    for version in (0,)
) | frozenset(f"{name}Backward{v}" for name in ("Unsqueeze", "Squeeze") for v in range(3))
_COPIES = frozenset({"ToCopyBackward0"})
_REARRANGED = frozenset(
    {"CloneBackward0", "ConstantPadNdBackward0", "ExpandBackward0", "AliasBackward0"}
)
# Of nodes that a tensor may have which a call has copied from its argument, or viewed.
MAY_BE_COPY = _ORDER_KEPT | _COPIES | _REARRANGED
# The name of what no mode sees and no frame tells.
UNKNOWN = "unknown"
# The autograd.Function that runs what torch.compile made.
GRAPH = "CompiledFunction"
STRIDED = torch.strided
# Enough for every chain that torch builds inside one operation; a bound, so that a walk is cheap.
_WALK = 8
# The position of an argument that is usually given by name.
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask"),
    "cross_entropy": ("input", "target", "weight"),
}
_COMMON_KEYWORDS = ("input", "weight", "bias")


# A tensor among the arguments: its position, None where only a name is known; its name; and it.
_Given = tuple[int | None, str | None, torch.Tensor]
_NOTHING: Mapping[int, Any] = {}
_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


class Match(NamedTuple):
    """The argument whose data a saved tensor holds; no position where only a name is known.

    `memory`: it is the same memory. `cast`: it is a copy in another dtype with the elements in the
    same order, so that equal arguments give equal copies.
    """

    position: int | None
    keyword: str | None
    tensor: torch.Tensor
    memory: bool
    cast: bool


class Operation:
    """One call of a torch function, or of one that torch does not know (`custom`).

    The latter are autograd.Functions, and operators and functions of other libraries: `library` is
    whose, empty for torch's own. `position` is the one, among all that the call saves, of the
    tensor that it is saving now; `kept` is what is kept of arguments, by position, where something
    else that the call saves depends on it. `waiting` is told what else is saved, and of the end of
    the call, where that decides how a tensor is kept. `plans` are those for calls like this one,
    and `beside` what its arguments keep of one storage.
    """

    __slots__ = (
        *("_answer", "_asked", "_found"),
        *("args", "beside", "custom", "kept", "kwargs", "largest"),
        *("library", "name", "plans", "position", "waiting"),
    )

    def __init__(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], library: str = ""
    ) -> None:
        self.name = name
        self.library = library
        self.custom = library != ""
        self.position = 0
        self.kept: Mapping[int, Any] = _NOTHING
        self.waiting: Any = None
        self.largest = 0  # of what was saved so far, in elements, where no argument is known
        self.plans: Any = None
        self.beside: Any = None
        self.args = args
        self.kwargs = kwargs
        self._found: list[_Given] | None = None
        self._asked: torch.Tensor | None = None
        self._answer: Match | None = None

    @property
    def untold(self) -> bool:
        """Whether nothing is known of the arguments."""
        return self.custom and not self.args and not self.kwargs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [tensor for _, _, tensor in self._given()]

    def argument(self, position: int) -> torch.Tensor | None:
        """Return the tensor that was given at a position, None if there is none or are several."""
        found = [tensor for place, _, tensor in self._given() if place == position]
        return found[0] if len(found) == 1 else None

    def option(self, position: int, keyword: str, default: Any) -> Any:
        """Return an argument that is no tensor, as it was given or by default."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(keyword, default)

    def _given(self) -> list[_Given]:
        """Return the tensors with their places; those in a list have the place of the list."""
        if self._found is None:
            found: list[_Given] = []
            for position, value in enumerate(self.args):
                if type(value) in PLAIN:
                    found.append((position, None, value))
                elif type(value) not in _NO_TENSORS:  # isinstance asks torch, which takes longer
                    _add_tensors(found, value, position, None)
            keywords = _KEYWORDS.get(self.name, _COMMON_KEYWORDS) if self.kwargs else ()
            for keyword, value in self.kwargs.items():
                place = keywords.index(keyword) if keyword in keywords else None
                _add_tensors(found, value, place, keyword)
            self._found = found
        return self._found

    @property
    def needs_exact(self) -> bool:
        """Whether backward needs exact values of what the operation saves."""
        return not self.custom and exactness.needs_exact(self.name, self.args, self.kwargs)

    def match(self, tensor: torch.Tensor) -> Match | None:
        """Return the argument that a saved tensor is, views and casts of it; None for all else."""
        # The rules ask for one tensor several times; what is asked for is alive while they do.
        if self._asked is not tensor:
            self._answer = self._find(tensor)
            self._asked = tensor
        return self._answer

    def _find(self, tensor: torch.Tensor) -> Match | None:
        for position, value in enumerate(self.args):
            if value is tensor:
                return Match(position, None, tensor, True, False)
        given = self._given()
        for place in given:
            if place[2] is tensor:
                return Match(*place, True, False)
        numel, dtype = tensor.numel(), tensor.dtype
        for place in given:
            other = place[2]
            if other.numel() == numel and other.dtype == dtype and _same_memory(other, tensor):
                return Match(*place, True, False)
        return None if tensor.grad_fn is None else self._match_copy(tensor)

    def _match_copy(self, tensor: torch.Tensor) -> Match | None:
        node: Any = tensor.grad_fn
        output: Any = tensor.output_nr
        cast = True
        copied = False
        for _ in range(_WALK):
            if copied:
                place = self._made_by(node, output)
                if place is not None:
                    return Match(*place, False, cast)
            name = "" if node is None else node.name()
            if name not in MAY_BE_COPY:
                return None
            cast = cast and name not in _REARRANGED
            copied = copied or name not in _ORDER_KEPT
            node, output = node.next_functions[0]
        return None

    def _made_by(self, node: Any, output: int) -> _Given | None:
        for place in self._given():
            tensor = place[2]
            if tensor.grad_fn is None:
                if tensor.requires_grad and getattr(node, "variable", None) is tensor:
                    return place
            elif tensor.grad_fn is node and tensor.output_nr == output:
                return place
        return None


def _add_tensors(
    found: list[_Given], value: Any, position: int | None, keyword: str | None
) -> None:
    if isinstance(value, torch.Tensor):
        found.append((position, keyword, value))
    elif isinstance(value, (list, tuple)):
        found += [(position, keyword, item) for item in value if isinstance(item, torch.Tensor)]


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of as many elements and one dtype are the same ones, in whatever shape."""
    if not (type(one) in PLAIN or is_labelled(type(one))) or one.layout is not STRIDED:
        return False
    if one.storage_offset() != other.storage_offset():
        return False
    # Both live now, and a storage has one object in Python as long as it does.
    return one.untyped_storage() is other.untyped_storage()
