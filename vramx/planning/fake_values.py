"""Values of tensors without data, where the program has them: counters, lengths, positions, flags.

A small tensor of integers or one number that the program holds, or makes of nothing, keeps a real
copy on the host beside its stand-in. Operations on such tensors alone are computed for the copies
too, views of them share memory as theirs do, and a write of what is not known spoils a copy with
all of its views. So a buffer that counts, the lengths of a batch or a loop's end can be read, and
nothing is guessed. Not thread-safe; some microseconds an operation, more where values are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# The copies are for counters, and for lengths, masks and positions of a batch. An operation takes
# some 0.1 ms for the largest; with half as many, 32 rows of 2048 tokens are not known.
MOST_ELEMENTS = 1 << 16
_MOST_BYTES = 8 * MOST_ELEMENTS
Copies = dict[int, torch.UntypedStorage]
_KEPT, _SPOILED = "_vramx_value", "_vramx_spoiled"
_aten = torch.ops.aten
# What makes a tensor of numbers alone.
_FACTORIES = {
    *(_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.scalar_tensor.default),
    *(_aten.arange.default, _aten.arange.start, _aten.arange.start_step),
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
}
# Of elements that are all the same these make the same of one element.
_OF_ONE = {
    *(_aten.any.default, _aten.any.dim, _aten.all.default, _aten.all.dim),
    *(_aten.logical_not.default, _aten.logical_or.default, _aten.logical_and.default),
    *(_aten.bitwise_not.default, _aten.bitwise_or.Tensor, _aten.bitwise_and.Tensor),
    *(_aten._is_any_true.default, _aten._is_all_true.default),
}
_FINITE: dict[Any, bool] = {
    **dict.fromkeys((torch.isfinite, Tensor.isfinite), True),
    **dict.fromkeys((torch.isnan, Tensor.isnan, torch.isinf, Tensor.isinf), False),
    _aten.isnan.default: False,  # as the engine asks, to detect anomalies
}
_OF_ITSELF = {_aten.eq.Tensor: True, _aten.ne.Tensor: False}  # another way to ask for NaN


class _Kept:
    """What is known of a stand-in: a tensor on the host.

    torch copies the attributes of a tensor with it, with modes that know no tensors with data.
    """

    __slots__ = ("values",)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def is_spoiled(self) -> bool:
        return getattr(self.values.untyped_storage(), _SPOILED, False)

    def spoil(self) -> None:
        setattr(self.values.untyped_storage(), _SPOILED, True)

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Kept:
        if self.is_spoiled:
            return self
        with real(), torch.no_grad():
            return _Kept(self.values.clone())


def value_of(tensor: Any) -> Tensor | None:
    """Return the values of a tensor without data, None where they are not known."""
    if not isinstance(tensor, FakeTensor):
        return None
    kept = getattr(tensor, _KEPT, None)
    if kept is None:
        return getattr(tensor, "constant", None)
    return None if kept.is_spoiled else kept.values


def keep_value(stand_in: Tensor, tensor: Tensor, copies: Copies | None = None) -> None:
    """Keep a copy of the values of a tensor of the program beside what stands for it.

    Args:
        copies: of storages, by their address, where several tensors of the program may share one.
    """
    if isinstance(tensor, FakeTensor):  # of a program that was itself made without data
        known = value_of(tensor)
        if known is not None:
            with real():
                _keep(stand_in, known.clone())
        return
    if tensor.device.type == "meta" or not _is_read(tensor):
        return
    whole = tensor.untyped_storage()
    with real(), torch.no_grad():
        copy = None if copies is None else copies.get(whole._cdata)
        if copy is None and whole.nbytes() > _MOST_BYTES:
            _keep(stand_in, tensor.detach().to("cpu", copy=True))
            return
        if copy is None:
            copy = whole.cpu().clone()
            if copies is not None:
                copies[whole._cdata] = copy
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        _keep(stand_in, torch.empty(0, dtype=tensor.dtype).set_(copy, *place))


def forget_value(stand_in: Any) -> None:
    """Know nothing of a tensor without data any more."""
    stand_in.__dict__.pop(_KEPT, None)
    stand_in.constant = None


def follow(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """Compute for known values what an operation made of their stand-ins."""
    if func in _FACTORIES:
        if result.layout == torch.strided and result.numel() <= MOST_ELEMENTS:
            _compute(func, args, kwargs, result)
        return
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not given or any(value_of(x) is None for x in given):  # the first of most is not known
        _spoil(func, args, kwargs)
        return
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    large = any(x.numel() > MOST_ELEMENTS for x in (*given, *made))
    if (large and func not in _OF_ONE) or torch.Tag.nondeterministic_seeded in func.tags:
        _spoil(func, args, kwargs)
    else:
        _compute(func, args, kwargs, result)


def _compute(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    try:
        with real():
            computed = func(*tree_map(_known, args), **tree_map(_known, kwargs))
    except Exception:  # of what cannot be computed nothing is known
        _spoil(func, args, kwargs)
        return
    for stand_in, value in zip(tree_leaves(result), tree_leaves(computed), strict=False):
        both = isinstance(stand_in, FakeTensor) and isinstance(value, Tensor)
        if both and value.layout == torch.strided:
            whole = _as_large(value, stand_in)
            if whole.shape == stand_in.shape and whole.dtype == stand_in.dtype:
                _keep(stand_in, whole)


def _as_large(value: Tensor, stand_in: Tensor) -> Tensor:
    """Return one element as all of those that it was computed for."""
    if value.shape == stand_in.shape or value.numel() != 1:
        return value
    with real():
        return value.reshape([1] * stand_in.dim()).expand(stand_in.shape)


def taken_for_finite(function: Any, args: Any, result: Any) -> bool:
    """Have isnan() and its like find what they are there to rule out nowhere."""
    found = _FINITE.get(function)
    if function in _OF_ITSELF and args[0] is args[1]:
        found = _OF_ITSELF[function]
    if found is None or not isinstance(result, FakeTensor):
        return False
    with real():
        _keep(result, torch.full((1,) * result.dim(), found, device="cpu").expand(result.shape))
    return True


def taken_for_large(func: Any, result: Any) -> bool:
    """Have a single number that is drawn between 0 and 1 be as good as 1: no layer is left out."""
    if func is not _aten.rand.default or result.numel() != 1:
        return False
    with real():
        _keep(
            result, torch.full(result.shape, 1 - torch.finfo(result.dtype).eps, dtype=result.dtype)
        )
    return True


def _is_read(tensor: Tensor) -> bool:
    """Tell whether a program may read a tensor: several integers, or one number."""
    if tensor.layout != torch.strided or tensor.is_complex():
        return False
    return tensor.numel() <= (1 if tensor.is_floating_point() else MOST_ELEMENTS)


def _keep(stand_in: Tensor, value: Tensor) -> None:
    setattr(stand_in, _KEPT, _Kept(value))


def _known(value: Any) -> Any:
    """Return what an argument is on the host."""
    if isinstance(value, FakeTensor):
        found = value_of(value)
        if found is None:  # of a factory, which reads the shape alone
            return torch.empty(value.shape, dtype=value.dtype)
        alike = found.numel() > MOST_ELEMENTS
        return found[(slice(0, 1),) * found.dim()] if alike else found
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _spoil(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Forget what an operation writes to."""
    if not func._schema.is_mutable:
        return
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[at] if at < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(written):
                kept = getattr(tensor, _KEPT, None)
                if kept is not None:
                    kept.spoil()


@contextlib.contextmanager
def real() -> Iterator[None]:
    """Run what is within with data, on the host."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
