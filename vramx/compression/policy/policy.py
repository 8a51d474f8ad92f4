"""What is done with a tensor that an operation saves: how many bits, or kept and why.

What is not known is kept: an operation is packed only where exactness.py (torch's own) or
third_party.py (those of other libraries) names it, or the user's policy does.

The rules are asked in one order and the first that speaks decides. This file only decides; hooks
carries it out. A SavePolicy is immutable but for a cache and belongs to one thread. A decision
costs half a microsecond for what is small and 3 to 9 for what is large enough to matter, which
plans.py asks for once for all that are alike; no rule looks at the elements of a tensor. What a
rule asks of a tensor or a call must be in the keys of looks.py.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from vramx.compression import attention
from vramx.compression.codec.geometry import covered_elements, shape_of
from vramx.compression.codec.mapping import is_result
from vramx.compression.codec.roots import (
    MAYBE_POWERS,
    SLOPES,
    SUMMED,
    graph_of_factor,
    is_of_decades,
)
from vramx.compression.codec.rows import is_too_short, pixel_length, shared_row
from vramx.compression.config import BITS, GROUP_SIZES, KEEP, MASK_BITS, WIDTHS, Compression, Rule
from vramx.compression.fakes import PLAIN, is_labelled
from vramx.compression.policy import third_party
from vramx.compression.policy.calls import GRAPH, STRIDED, Operation
from vramx.compression.policy.calls import UNKNOWN as UNKNOWN_CALL
from vramx.compression.policy.columns import LAYERS, undoes_columns
from vramx.compression.policy.exactness import (
    FACTORS,
    NORMS,
    PRODUCTS,
    RECURRENT,
    ROW_SUMS,
    SIGN_ONLY,
    SIZE_ONLY,
    SMOOTH,
    norm_length,
)
from vramx.compression.policy.weights import (
    is_any_weight,
    is_parameter,
    is_read_for_a_weight,
    storages_of,
)
from vramx.errors import UnsupportedTensorError

# Reasons for which a tensor is kept, as CompressionStats counts them.
INTEGER = "integer"
SMALL = "small"
PARAMETER = "parameter"
LEAF = "leaf"
INPUT = "input"
SUBCLASS = "subclass"
LAYOUT = "layout"
DEVICE = "device"
DTYPE = "dtype"
POLICY = "policy"
STATISTIC = "statistic"
UNKNOWN = "unknown"
DERIVATIVE = "derivative"
HELD = "held"
DISABLED = "disabled"
# What `strict` refuses: data that would have been compressed if that were possible.
UNSUPPORTED = frozenset({SUBCLASS, LAYOUT, DEVICE, DTYPE})
# Kept by reference without a further look: memory that lives as long as the graph in any case.
OWNED_ELSEWHERE = frozenset({PARAMETER, LEAF, INPUT})

# Kept for what they are, not for whose memory they lie in: a look at the storage may save memory.
EXAMINED = frozenset({SMALL, POLICY, STATISTIC, UNKNOWN, DERIVATIVE})

_PACKED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_DATA = _PACKED_DTYPES | {torch.bool}
_ATTENTION = "scaled_dot_product_attention"
# A result with this many elements fewer than the largest argument is a statistic of it, such as the
# logsumexp of attention or the reciprocal deviation of a norm: nothing to gain and much to lose.
_STATISTIC_RATIO = 16
# The same for a result of fewer dimensions: attention has heads of 8, too.
_REDUCED_RATIO = 4


class Choice(NamedTuple):
    """What is done with one tensor: `bits` to pack it with, 0 to keep it; `reason` it is kept.

    `most` is the size that its groups may have at most, whatever the options say; 0: any.
    """

    bits: int
    reason: str
    most: int = 0


# Their kernels fill what was saved before: the noise of its slopes.
_FILLED_LATER = frozenset({"rrelu", "rrelu_with_noise"})
_CHOICES = {bits: Choice(bits, "") for bits in range(1, 9)}
_REASONS = (INTEGER, SMALL, PARAMETER, LEAF, POLICY, STATISTIC, UNKNOWN, DERIVATIVE, DISABLED)
_KEPT = {reason: Choice(0, reason) for reason in (*_REASONS, *UNSUPPORTED)}
# Of what lies in memory that the module owns; it is asked for behind these reasons.
OWNED = _KEPT[PARAMETER]
WHEREVER = UNSUPPORTED | {DISABLED, INTEGER, PARAMETER, SMALL, LEAF}


class SavePolicy:
    """Answer for one Compression what is kept of a tensor: packed with how many bits, or itself.

    Asked by hooks for what operations save, and by checkpoints for what they compute with again.
    The `module` is the one whose forward runs, where there is one. With `only_weights` packed is
    only what the gradient of a weight alone reads.
    """

    def __init__(
        self,
        options: Compression,
        module: torch.nn.Module | None = None,
        *,
        only_weights: bool = False,
    ) -> None:
        self._options = options
        self._only_weights = only_weights
        self._bits = BITS.get(options.level, 0)
        # Weakly: a graph holds the hooks, and a module may hold its graph, as a weight norm does.
        self._module = None if module is None else weakref.ref(module)
        self.min_bytes = max(1, int(options.min_bytes))
        self._by_operation, plain = _tables(options)
        self._plain = {} if only_weights else plain
        self._owned: frozenset[int] | None = None
        self.packs = bool(self._bits)
        # Whether looks.py's keys hold all that is asked: not the graphs of other arguments.
        self.sees_alike = not only_weights

    def choose(self, tensor: torch.Tensor, operation: Operation | None) -> Choice:
        """Decide for a tensor that `operation` is saving; None where none is.

        Raises:
            UnsupportedTensorError: the options are strict, and the tensor cannot be compressed.
        """
        choice = self.choose_by_look(tensor, operation)
        if choice.reason not in WHEREVER and self.owns(tensor.untyped_storage()):
            return OWNED
        return choice

    def choose_by_look(self, tensor: torch.Tensor, operation: Operation | None) -> Choice:
        """Do so without asking whether the module owns the memory: what is packed, it may own."""
        reason = self._reason(tensor, operation)
        if reason is None:
            if operation is not None:
                choice = self._plain.get(operation.name)
                if choice is not None and not operation.custom and tensor.dtype != torch.bool:
                    return _KEPT[POLICY] if _has_short_rows(tensor, operation) else choice
            level = self._level(tensor, operation)
            if level is None:
                return self._default(tensor, operation)
            return _KEPT[POLICY] if level == KEEP else _CHOICES[WIDTHS[level]]
        if self._options.strict and reason in UNSUPPORTED:
            raise UnsupportedTensorError(_refusal(tensor, operation, reason))
        return _KEPT[reason]

    def _reason(self, tensor: torch.Tensor, operation: Operation | None) -> str | None:
        """Return why the tensor is kept, None where nothing but the policy is against packing."""
        if not self._bits:
            return DISABLED
        # A call in Python takes as long as three looks at a tensor: no more of them than needed.
        dtype = tensor.dtype
        if type(tensor) is not Tensor and is_parameter(tensor):
            return PARAMETER
        if dtype not in _DATA and not dtype.is_floating_point and not dtype.is_complex:
            return INTEGER
        if tensor.numel() * dtype.itemsize < self.min_bytes:
            return SMALL
        if tensor.requires_grad and tensor.grad_fn is None:
            return LEAF  # the graph holds it anyway, to give it its gradient
        plain = type(tensor) in PLAIN or (
            # Backward in Python would be given a tensor of another type than it saved.
            operation is not None and not operation.custom and is_labelled(type(tensor))
        )
        plain = plain and tensor.layout is STRIDED and dtype in _DATA
        if (
            not plain
            or not (tensor.is_cuda or tensor.is_cpu)
            or tensor.is_nested
            or tensor.is_neg()
        ):
            reason = _unsupported(tensor)
            may_be_weight = reason in (DTYPE, SUBCLASS)
            return PARAMETER if may_be_weight and is_any_weight(tensor, operation) else reason
        if (
            not tensor.is_contiguous()
            and covered_elements(tensor) * dtype.itemsize < self.min_bytes
        ):
            return SMALL  # a small tensor, expanded
        if is_any_weight(tensor, operation):
            return PARAMETER
        return STATISTIC if operation is not None and _is_statistic(tensor, operation) else None

    def _level(self, tensor: torch.Tensor, operation: Operation | None) -> str | None:
        """Return what the user's policy says, None where it says nothing."""
        rules = None if operation is None else self._by_operation.get(_canonical(operation.name))
        if operation is None or not rules:
            return None
        some = operation.name == GRAPH or any(rule.arguments is not None for rule in rules)
        if some and operation.untold:  # which is an argument, and which a weight, is not seen
            return None
        mask = tensor.dtype == torch.bool
        match = operation.match(tensor)
        if match is None and _canonical(operation.name) in _FILLED_LATER:
            return KEEP
        position = None if match is None else match.position
        for rule in rules:
            fits = rule.arguments is None or position in rule.arguments
            if fits and (rule.mask == mask or (mask and rule.level == KEEP)):
                return rule.level
        return None

    def _default(self, tensor: torch.Tensor, operation: Operation | None) -> Choice:
        """Pack what is named as harmless, and keep all else."""
        if tensor.dtype == torch.bool:
            return _CHOICES[MASK_BITS]  # a bit holds all of it
        if operation is None:
            return _CHOICES[self._bits]
        if self._only_weights and not is_read_for_a_weight(tensor, operation):
            return _KEPT[DERIVATIVE]
        if operation.custom:
            return self._third_party(operation)
        if operation.name in SIGN_ONLY:
            return _CHOICES[MASK_BITS]
        if _is_attention(operation.name):
            packed = attention.is_value(tensor, operation) and attention.may_pack_value(operation)
            return _CHOICES[self._bits] if packed else _KEPT[POLICY]
        if operation.name in NORMS:
            return self._norm(tensor, operation)
        if operation.name in RECURRENT and _is_of_kernel(tensor, operation):
            return _KEPT[POLICY]
        exact = operation.needs_exact or is_result(tensor) or _has_short_rows(tensor, operation)
        # A constant may be as far from even as a program likes: distances along a ray, whose last
        # one is 1e10, hide all others of a group.
        exact = exact or (operation.name in FACTORS and not tensor.requires_grad)
        exact = exact or any(graph_of_factor(tensor, operation))
        exact = exact or (operation.name in SLOPES and is_of_decades(operation))
        exact = exact or (operation.name in LAYERS and undoes_columns(operation))
        return _KEPT[POLICY] if exact else _CHOICES[self._bits]

    def _norm(self, tensor: torch.Tensor, operation: Operation) -> Choice:
        """Pack rows that are divided by a norm of their own in groups of their own.

        In a group with a larger row a small one would be lost. Of norms that subtract a mean
        normalised.py has the answer.
        """
        length = norm_length(operation.name, operation.option)
        if not length:
            return _CHOICES[self._bits]
        most = length & -length  # the largest power of two that divides it
        if most < GROUP_SIZES[0] or not tensor.is_contiguous():
            return _KEPT[POLICY]
        return Choice(self._bits, "", min(most, GROUP_SIZES[-1]))

    def _third_party(self, operation: Operation) -> Choice:
        library, name = operation.library, operation.name
        if third_party.is_packed(library, name, operation.position):
            return _CHOICES[self._bits]
        return _KEPT[POLICY if third_party.is_known(library, name) else UNKNOWN]

    def is_parameter(self, tensor: torch.Tensor, operation: Operation | None) -> bool:
        """Whether a plain tensor is a parameter or buffer, a view or a cast of one, or a weight."""
        return is_any_weight(tensor, operation) or self.owns(tensor.untyped_storage())

    def plainly_kept(self, tensor: torch.Tensor) -> str:
        """Return why a tensor is kept where hardly anything need be asked, else an empty text.

        It is a parameter, or small, as all its memory is.
        """
        if tensor.layout is not STRIDED or not self.packs:
            return ""
        if type(tensor) is Parameter:
            return PARAMETER
        is_small = (
            tensor.nbytes < self.min_bytes
            and type(tensor) is Tensor
            and tensor.dtype in _DATA
            and tensor.is_contiguous()
            and not is_functorch_wrapped_tensor(tensor)
            and tensor.untyped_storage().nbytes() < self.min_bytes
        )
        return SMALL if is_small else ""

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether the memory is of the module's parameters or buffers, which the module holds."""
        if self._owned is None:
            module = None if self._module is None else self._module()
            if module is None:
                return False
            self._owned = storages_of(module)
        return storage._cdata in self._owned


@lru_cache(maxsize=256)
def _tables(options: Compression) -> tuple[dict[str, list[Rule]], dict[str, Choice]]:
    """Return the rules by operation, and what is done where none of them speaks."""
    plain = _plain_choices(BITS.get(options.level, 0), options.rules)
    return _rules_by_operation(options.rules), plain


def _rules_by_operation(rules: tuple[Rule, ...]) -> dict[str, list[Rule]]:
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        found.setdefault(_canonical(rule.operation), []).append(rule)
    return found


def _plain_choices(bits: int, rules: tuple[Rule, ...]) -> dict[str, Choice]:
    """Return, by name, what is done where no rule speaks and no argument matters."""
    named = _rules_by_operation(rules)
    found = dict.fromkeys(PRODUCTS | SMOOTH | SIZE_ONLY, _CHOICES[bits or MASK_BITS])
    found |= dict.fromkeys(SIGN_ONLY, _CHOICES[MASK_BITS])
    # Attention, recurrent networks, layers, and what may be the power of a power, or one of two
    # slopes that are taken from one another, depend on what they are called with.
    others = MAYBE_POWERS | SUMMED | RECURRENT | SLOPES | LAYERS
    return {
        name: choice
        for name, choice in found.items()
        if _canonical(name) not in named and not _is_attention(name) and name not in others
    }


def _is_of_kernel(tensor: Tensor, operation: Operation) -> bool:
    """Tell whether a kernel has made what it saves: gates, whose slopes vanish, or weights."""
    return tensor.grad_fn is None and operation.match(tensor) is None


def _is_attention(name: str) -> bool:
    return _canonical(name) == _ATTENTION


@lru_cache(maxsize=1024)
def _canonical(name: str) -> str:
    name = name.strip("_")
    return _ATTENTION if name.startswith("scaled_dot_product") else name


def _unsupported(tensor: torch.Tensor) -> str:
    """Return why a tensor is none that could be packed."""
    if type(tensor) not in PLAIN:
        return SUBCLASS
    if tensor.layout is not STRIDED or tensor.is_nested:
        return LAYOUT
    if not tensor.is_cuda and not tensor.is_cpu:
        return DEVICE
    return LAYOUT if tensor.dtype in _DATA else DTYPE


def _is_statistic(tensor: torch.Tensor, operation: Operation) -> bool:
    if operation.untold and operation.name != UNKNOWN_CALL:
        return _is_untold_statistic(tensor, operation)
    is_factor = operation.name in FACTORS
    if not is_factor and operation.match(tensor) is not None:
        return False
    # A graph is many operations: what it saves is no statistic of what it was given.
    if tensor.dtype == torch.bool or operation.name == GRAPH:
        return False
    data = [t for t in operation.tensors if not is_parameter(t)]
    largest = max([t.numel() for t in data], default=0)
    elements = covered_elements(tensor)
    if operation.name in NORMS:  # also of a norm over a few elements: backward divides by it
        return elements < largest
    if is_factor:
        # One that is repeated: columns may differ by much in scale, and each is off in all rows.
        shapes = [t.shape for t in operation.tensors if not t.is_nested]
        return bool(elements < torch.broadcast_shapes(*shapes).numel())
    if elements * _REDUCED_RATIO > largest:
        return False
    reduced = tensor.dim() < max([t.dim() for t in data])
    return reduced or elements * _STATISTIC_RATIO <= largest


def _is_untold_statistic(tensor: torch.Tensor, operation: Operation) -> bool:
    """Tell it of what a Function made itself, whose arguments are not known: by its shape, or by
    what was saved before it."""
    elements, before = covered_elements(tensor), operation.largest
    operation.largest = max(elements, before)
    if tensor.requires_grad or tensor.dtype == torch.bool:
        return False
    reduced = tensor.dim() < 2 or tensor.shape[-1] == 1
    return reduced or elements * _REDUCED_RATIO <= before


def _has_short_rows(tensor: torch.Tensor, operation: Operation) -> bool:
    """Tell whether what may add up rows reads some of so few elements that none has a scale."""
    if operation.name not in ROW_SUMS:
        return False
    length = shared_row(tensor) or pixel_length(tensor, operation)
    return length > 0 and is_too_short(tensor, length)


def _refusal(tensor: torch.Tensor, operation: Operation | None, reason: str) -> str:
    what = {
        SUBCLASS: f"a {type(tensor).__name__}; accepted are plain tensors",
        LAYOUT: f"of layout {tensor.layout}; accepted are strided tensors",
        DEVICE: f"on {tensor.device}; accepted are cpu and cuda",
        DTYPE: f"of dtype {tensor.dtype}; accepted are float32, bfloat16, float16 and bool",
    }[reason]
    by = "an operation" if operation is None else operation.name
    return f"strict: {by} saves a tensor of size {shape_of(tensor)} that is {what}"
