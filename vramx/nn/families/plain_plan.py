"""What a plain block is: the parts of one that was read, and questions of modules and buffers.

Besides the versions of buffers that were looked at there is no state.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from vramx.nn.families.projection import LORAS, QUANTISED
from vramx.nn.families.questions import class_name, part_of

_SMALLEST_TABLE = 6  # tokens, more than a record is followed with


class Norm(NamedTuple):
    """A norm: a module's path, or the paths of a weight and a bias of a layer norm and its eps."""

    module: str | None
    weight: str | None = None
    bias: str | None = None
    eps: float = 0.0


class Heads(NamedTuple):
    """Which elements of a projection's result are the heads of q, k or v."""

    projection: int
    start: int
    number: int
    size: int


class Attention(NamedTuple):
    """How heads attend: `dropout` is a probability in training, or a Dropout's path."""

    heads: tuple[Heads, Heads, Heads]
    dropout: float | str
    is_causal: bool
    scale: float | None


class Constants:
    """Values of attributes of a module, of its parts and of objects in these, by path."""

    def __init__(self, known: dict[str, Any]) -> None:
        self._known = known
        # Of a single one it would be no tuple.
        self._look = attrgetter(*known, next(iter(known)))
        self._values = (*known.values(), next(iter(known.values())))

    def hold(self, module: Any, compiles: bool) -> bool:
        """Tell whether they are what they were."""
        if compiles:  # what it reads is guarded
            for path, value in self._known.items():
                at, _, name = path.rpartition(".")
                if getattr(part_of(module, at), name, None) != value:
                    return False
            return True
        try:
            return bool(self._look(module) == self._values)
        except Exception:  # it is gone, or of a kind that is not compared
            return False


class Members(NamedTuple):
    """What a module of a block had, as far as the block's code may see it.

    `parent` is the number of the module that has it under `name`, "" for the block itself; `keys`
    are the names of its modules and tensors, `kinds` the classes of its modules but for linears,
    which may become others, and `absent` names of tensors that are None. `others` are all its
    attributes, and `names` what the code names (None: any).
    """

    parent: int
    name: str
    keys: list[str]
    kinds: tuple[tuple[str, type], ...]
    absent: tuple[str, ...]
    others: frozenset[str]
    names: frozenset[str] | None
    constants: Constants | None


class Plan(NamedTuple):
    """A block: parts by their paths, or modules of its own for what calls a function.

    `unit` is the activation and what its result goes through, `after` what the result of each
    branch goes through before it is added. `nothing` are modules that did nothing in it, `tables`
    buffers that say what is later, `through` the modules whose forwards were read, `members` what
    modules had, `reads` what their code reads of other things, and `defaults` the values of what
    else the forward takes.
    """

    norms: tuple[Norm, Norm]
    projections: tuple[str, ...]
    attention: Attention
    output: str
    inner: str
    unit: tuple[str | nn.Module, ...]
    outer: str
    after: tuple[tuple[str | nn.Module, ...], tuple[str | nn.Module, ...]]
    nothing: tuple[str, ...]
    tables: tuple[str, ...]
    through: tuple[str, ...] = ()
    members: tuple[Members, ...] = ()
    reads: Any = None  # a plain_code.Reads
    defaults: dict[str, Any] = {}  # noqa: RUF012 - nobody writes into it


class NotPlainError(Exception):
    """What is in the way of reading a block."""


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a Linear, with adapters or quantised perhaps."""
    return type(module) is nn.Linear or class_name(type(module)) in LORAS | QUANTISED


def is_opaque(module: nn.Module) -> bool:
    """Tell whether a module of a program's own has no parts: in some places it is just called."""
    of_torch = type(module).__module__.partition(".")[0] == "torch"
    return not of_torch and next(module.children(), None) is None


def has_opaque(module: nn.Module, plan: Plan) -> bool:
    """Tell whether a block calls modules of which nothing is known: they may compare or choose."""
    paths = (*(norm.module for norm in plan.norms), *plan.unit, *plan.after[0], *plan.after[1])
    parts = (part_of(module, path) for path in paths if isinstance(path, str))
    return any(is_opaque(part) for part in parts)


def is_table(buffer: Any) -> bool:
    """Tell whether a buffer says for each two tokens whether one is later, or is not.

    Looked at once, until it is written to.
    """
    return _is_of_later(buffer) is not None


def table_of(buffer: Tensor) -> Tensor:
    """Return what a table says, on the host."""
    rows, columns = buffer.shape[-2:]
    later = torch.ones(rows, columns, dtype=torch.bool).triu(1)
    return (later if _is_of_later(buffer) else ~later).view(buffer.shape).to(buffer.dtype)


def note_stand_in(stand_in: Tensor, tensor: Tensor) -> None:
    """Note that a tensor without data stands for one, which may be a table."""
    is_of_later = _is_of_later(tensor)
    if is_of_later is not None:
        _tables[stand_in] = stand_in._version, is_of_later


def _is_of_later(buffer: Any) -> bool | None:
    """Tell whether a table is not zero for what is later, or for what is not; None of no table."""
    if not isinstance(buffer, Tensor) or buffer.is_inference():
        return None
    known = _tables.get(buffer)
    if known is not None and known[0] == buffer._version:
        return bool(known[1])
    size = buffer.shape[-1] if buffer.dim() > 1 else 0
    if size < _SMALLEST_TABLE or buffer.shape[-2] != size or buffer.numel() != size * size:
        return None
    if type(buffer) is not Tensor or buffer.is_meta or buffer.layout is not torch.strided:
        return None
    with _disable_current_modes():
        found = (buffer.detach().cpu() != 0).view(size, size)
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        is_of_later = torch.equal(found, later)
        if not is_of_later and not torch.equal(found, ~later):
            return None
    _tables[buffer] = buffer._version, is_of_later
    return is_of_later


# Of buffers that were found to be tables the version of what is in them, and whether it is of what
# is later.
_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()
