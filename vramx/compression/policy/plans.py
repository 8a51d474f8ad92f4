"""What is done with a saved tensor, worked out once for all that are like it, in calls alike.

A Plan is a policy's choice and what follows from it: where the elements lie, how they are packed,
and what is packed in their place. Plans of one Compression serve all its sessions, for as long as
it lives: looks.py says when two tensors are alike. Safe from any thread, since each step is one
operation of a dictionary; threads that meet make a plan twice.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import astuple, replace
from functools import lru_cache

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from vramx.compression import attention
from vramx.compression.codec.geometry import Geometry, covered_elements, describe
from vramx.compression.codec.mapping import (
    ANGLES,
    BOUNDED,
    ENDS,
    SIGN,
    Mapping,
    Within,
    bound_of,
    function_of,
)
from vramx.compression.codec.normalised import MEAN_NORMS
from vramx.compression.codec.roots import (
    MAYBE_POWERS,
    ROOT,
    SUMMED,
    is_of_products,
    is_power,
    is_product,
)
from vramx.compression.codec.rows import (
    CONVOLUTIONS,
    is_too_short,
    pixel_length,
    reads_columns,
    shared_row,
)
from vramx.compression.config import (
    GROUP_SIZES,
    LEAST_OF_ROWS,
    MASK_BITS,
    Compression,
    Format,
)
from vramx.compression.fakes import PLAIN, is_labelled
from vramx.compression.policy import looks
from vramx.compression.policy.calls import STRIDED, Operation
from vramx.compression.policy.exactness import FACTORS, ROW_SUMS
from vramx.compression.policy.policy import EXAMINED, OWNED, WHEREVER, Choice, SavePolicy

# Kinds of calls, and of tensors in one; a program with more of them has sizes that never return.
_MOST_CALLS = 1024
_MOST_TENSORS = 256
# Operations whose arguments are packed as functions of them.
_MAPPED = MAYBE_POWERS | SUMMED | BOUNDED | CONVOLUTIONS
_numbers: dict[Hashable, int] = {}  # of formats


class Plan:
    """What is done with tensors that are alike.

    Attributes:
        bits: to pack them with; 0: they are kept.
        reason: why they are kept.
        is_counted_only: the reason says that no look at the storage saves memory.
        may_be_owned: they are kept all the same where the module owns their memory.
        geometry: where the elements lie, and
        nbytes: how many bytes of memory they are. Both are of strided tensors only.
        format, number: how they are packed, and a number that equal formats share.
        mapping: what is packed in place of the elements; None: these.
        row: how many elements have a scale of their own, which is packed in place of them as well;
            0: no mapping of rows.
        kind: what tells that from others of the same elements; None: the elements are packed.
        serves_all: what is packed comes back near the elements wherever these lie.
        normalises: the call is a norm's, whose statistics tell at its end what is packed.
        is_cast: the tensor is a cast of an argument, made by the call.
    """

    __slots__ = (
        *("bits", "format", "geometry", "is_cast", "is_counted_only", "kind", "mapping"),
        *("may_be_owned", "nbytes", "normalises", "number", "reason", "row", "serves_all"),
    )

    geometry: Geometry
    nbytes: int
    format: Format
    number: int
    mapping: Mapping | None
    row: int
    kind: Hashable | None
    serves_all: bool
    normalises: bool
    is_cast: bool

    def __init__(self, choice: Choice) -> None:
        self.bits, self.reason, _ = choice
        self.may_be_owned = choice.reason not in WHEREVER
        self.is_counted_only = False


_OWNED = Plan(OWNED)


class Like(dict[Hashable, Plan]):
    """The plans of calls that are alike, by the keys of their tensors."""

    def add(self, key: Hashable, plan: Plan) -> None:
        if len(self) >= _MOST_TENSORS:
            self.clear()
        self[key] = plan


UNALIKE = Like()  # of calls without a key: nothing is added


class Plans:
    """Those of one Compression, by the keys of calls and of tensors."""

    def __init__(self, options: Compression) -> None:
        self._options = options
        self.of_calls: dict[Hashable | None, Like] = {None: UNALIKE}
        # By bits and the most of a group.
        self._formats: dict[tuple[int, int], tuple[Format, int]] = {}

    def add_call(self, key: Hashable) -> Like:
        """Return the plans for calls with a key of which there are none."""
        if len(self.of_calls) > _MOST_CALLS:
            self.of_calls.clear()
            self.of_calls[None] = UNALIKE
        return self.of_calls.setdefault(key, Like())

    def make(self, tensor: torch.Tensor, operation: Operation, choice: Choice) -> Plan:
        """Return what follows from a choice for a tensor."""
        plan = Plan(choice)
        known = type(tensor) in PLAIN or is_labelled(type(tensor))
        if known and tensor.layout is STRIDED and not tensor.is_nested:
            plan.geometry = describe(tensor)
            plan.nbytes = plan.geometry.covered * tensor.element_size()
            plan.is_counted_only = not choice.bits and choice.reason not in EXAMINED
        if choice.bits:
            match = operation.match(tensor)
            plan.is_cast = match is not None and match.cast
            most = _most_of_rows(tensor, operation) if choice.bits > MASK_BITS else 0
            plan.format, plan.number = self.format(choice.bits, choice.most or most)
            is_norm = operation.name in MEAN_NORMS and not operation.custom
            plan.normalises = is_norm and choice.bits > MASK_BITS
            plan.mapping = _mapping(tensor, operation, plan.format)
            plan.kind, plan.serves_all = _kind_of(tensor, operation)
            plan.row = 0
            if choice.bits > MASK_BITS and not choice.most and _sums_rows(tensor, operation):
                plan.row = _row(tensor, operation, plan.format.group_size)
            if plan.row:
                plan.kind, plan.serves_all = ("rows", plan.row), True
        return plan

    def format(self, bits: int, most: int) -> tuple[Format, int]:
        """Return how elements are packed, in groups of at most so many, and its number."""
        found = self._formats.get((bits, most))
        if found is None:
            form = self._options.format(bits)
            if most and most < form.group_size:
                form = replace(form, group_size=most)
            # Of equal formats one number, as long as the process lives: there are few.
            number = _numbers.setdefault(astuple(form), len(_numbers))
            found = self._formats.setdefault((bits, most), (form, number))
        return found

    @property
    def numbers(self) -> list[int]:
        """The numbers of the formats that were asked for."""
        return [number for _, number in self._formats.values()]


@lru_cache(maxsize=32)
def plans_of(options: Compression) -> Plans:
    """Return the plans that all contexts with equal options share."""
    return Plans(options)


class Planner:
    """What one session does with what is saved: what was decided of its like, or is decided now."""

    def __init__(self, options: Compression, rules: SavePolicy) -> None:
        self._rules = rules
        self._plans = plans_of(options)
        self._of_calls = self._plans.of_calls

    def plan(self, tensor: torch.Tensor, operation: Operation) -> Plan | None:
        """Return what is done with a tensor.

        None for a tensor of torch.func's transforms, which stands for another and has no memory.
        """
        like = operation.plans
        if like is None:
            key = looks.of_call(operation) if self._rules.sees_alike else None
            like = self._of_calls.get(key)
            if like is None:
                like = self._plans.add_call(key)
            operation.plans = like
        found = None if like is UNALIKE else looks.of_tensor(tensor, operation)
        if found is None and is_functorch_wrapped_tensor(tensor):
            return None
        if found is None:
            return self._plans.make(tensor, operation, self._rules.choose(tensor, operation))
        key, storage = found
        plan: Plan | None = like.get(key)
        if plan is None:
            choice = self._rules.choose_by_look(tensor, operation)
            plan = self._plans.make(tensor, operation, choice)
            like.add(key, plan)
        # Where a tensor lies is no part of a key.
        is_owned = storage is not None and plan.may_be_owned and self._rules.owns(storage)
        return _OWNED if is_owned else plan

    @property
    def numbers(self) -> list[int]:
        """The numbers of the formats in which something may have been packed."""
        return self._plans.numbers


def _most_of_rows(tensor: torch.Tensor, operation: Operation) -> int:
    """Return how large the groups of rows may be for none to have parts of two; 0: any.

    A layer and a norm may follow, in which a small row counts as much as a large one. Whoever reads
    a tensor, its groups are the same, so that it is packed once. Of images, and of rows that could
    have groups of too few elements only, groups have parts of several: _row() has those rows.
    """
    length = _shared_row(tensor, operation)
    most = length & -length  # the largest power of two that divides it
    return most if LEAST_OF_ROWS <= most < GROUP_SIZES[-1] else 0


def _shared_row(tensor: torch.Tensor, operation: Operation) -> int:
    """Return how many elements a row has; of an attention's value it is a token's, of all heads."""
    tokens = attention.token_length(tensor, operation)
    return shared_row(tensor) if tokens is None else tokens


def _row(tensor: torch.Tensor, operation: Operation, group_size: int) -> int:
    """Return the length of rows that groups would have parts of several of; 0: they would not."""
    length = _shared_row(tensor, operation) or pixel_length(tensor, operation)
    if describe(tensor).span != covered_elements(tensor):  # windows, which overlap
        return 0
    return 0 if length % group_size == 0 or is_too_short(tensor, length) else length


def _sums_rows(tensor: torch.Tensor, operation: Operation) -> bool:
    """Tell whether backward may add up rows of what an operation saves."""
    if operation.custom or attention.token_length(tensor, operation):
        return True
    if operation.name in FACTORS:  # what has a result of tanh or sigmoid packed has it as angles
        return type(tensor.grad_fn).__name__ not in ANGLES
    return operation.name in ROW_SUMS


def _mapping(tensor: torch.Tensor, operation: Operation, format: Format) -> Mapping | None:
    """Return what is packed in place of a tensor's elements; None: these."""
    if format.bits == MASK_BITS:
        return None if tensor.dtype == torch.bool else SIGN
    if type(tensor.grad_fn).__name__ in ANGLES:
        function = function_of(tensor, operation)
        if function:
            return (ENDS if format.bits == 8 else ANGLES)[function]
    if operation.name not in _MAPPED:
        return None
    # A product's factor too, where roots cost little: what follows may leave only small products,
    # or what small columns give.
    if is_power(operation) or (format.bits == 8 and _is_factor(tensor, operation)):
        return ROOT
    bound = _bound(tensor, operation)
    return Within(bound, format.group_size) if bound else None


def _is_factor(tensor: torch.Tensor, operation: Operation) -> bool:
    is_factor = is_product(operation) or is_of_products(tensor, operation)
    return is_factor or reads_columns(tensor, operation)


def _bound(tensor: torch.Tensor, operation: Operation) -> int:
    """Return what a tensor is packed within; 0: nothing.

    Results of tanh and sigmoid are within each bound, and what these packed serves all.
    """
    return 0 if type(tensor.grad_fn).__name__ in ANGLES else bound_of(operation)


def _kind_of(tensor: torch.Tensor, operation: Operation) -> tuple[Hashable | None, bool]:
    """Return what is packed in place of a tensor, None if its elements are; and whether these come
    back near wherever they lie."""
    if operation.name not in _MAPPED:
        return None, False
    if is_power(operation):
        return "roots", True
    if _is_factor(tensor, operation):
        return None, True
    bound = _bound(tensor, operation)
    return (("within", bound) if bound else None), False
