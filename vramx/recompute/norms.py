"""Which norms read the inputs of a region: those inputs are packed as what is normalised.

A region that is recomputed from a packed input takes mean and deviation of what it finds. Where the
mean is many deviations, or rows and channels of different scale share a group, that is the noise of
packing. A watched run shows which tensor a norm is given, and what is normalised together; the
statistics are taken when an input is packed: two reductions over it. One that is written out is
seen by its mean, or that of squares across rows. A norm that reads a part or another order of an
input is not seen. So rows that share groups are packed as if a norm read them:
a class token may be a thousandth of what the patches are.

Pure but for what Readers note; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, strided

from vramx.compression.codec.geometry import describe
from vramx.compression.codec.normalised import Normal, Statistics
from vramx.compression.codec.rows import row_length
from vramx.recompute.tensors import storage_of

_ROWS = frozenset({"aten::native_layer_norm", "aten::_fused_rms_norm"})
_GROUPS = frozenset({"aten::native_group_norm"})
_CHANNELS = frozenset(
    {
        *("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"),
        *("aten::_native_batch_norm_legit", "aten::_batch_norm_with_update"),
    }
)
NORMS = _ROWS | _GROUPS | _CHANNELS
# Of a norm that is written out one of these is the first to read the input.
_MEANS = frozenset(f"aten::{name}" for name in ("mean", "var", "std", "var_mean", "std_mean"))
_SUMS = _MEANS | {"aten::sum"}  # of squares
_LENGTH = "aten::linalg_vector_norm"  # a root of such a sum
_COPIES = frozenset({"aten::clone", "aten::_to_copy"})
_POWERS = frozenset({"aten::square", "aten::pow", "aten::mul"})
_FIRST_PLACE = 2  # dimension, behind samples and channels
_OF_SEQUENCES = 3  # dimensions
_GROUPS_AT = 6  # the position of their number among the arguments
# Bytes of a row's elements of which its statistics, 8 bytes, are at most a quarter; in planes, as
# images are, rows are pixels side by side: so many elements.
_LEAST_BYTES, _ROW_OF_PLANE = 32, 64
_ROW = 16  # of a square's sum
# Parts of the names of operations that take dimensions behind the second as places side by side.
_SPATIAL = ("conv", "pool", "upsample", "grid_sampler")
_MEAN = 16  # that a mean which is written out is of: half a byte for each is worth it
_SMALLEST = 1e-30  # variance of equal numbers


class Norm(NamedTuple):
    """How a norm sees an input: its sizes and strides, the sizes in groups, and what it reduces."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    split: tuple[int, ...]
    dims: tuple[int, ...]

    def mapping(self, tensor: Tensor) -> Normal:
        """Return what is packed in place of an input's elements, of statistics that it takes."""
        seen = tensor.detach().as_strided(self.size, self.stride, tensor.storage_offset())
        variance, mean = torch.var_mean(
            seen.view(self.split).float(), self.dims, correction=0, keepdim=True
        )
        rstd = (variance + _SMALLEST).rsqrt()
        return Normal(Statistics(mean, rstd, self.split, tuple(mean.shape)), describe(seen))


class Places(NamedTuple):
    """How a convolution along one dimension sees an input: each place may have a scale of its own.

    Without a mean: channels may differ in scale, and groups have elements of one channel.
    """

    size: tuple[int, ...]

    def mapping(self, tensor: Tensor) -> Normal:
        """Return what is packed in place of an input's elements, of the root mean squares."""
        seen = tensor.detach()
        # One pass, and nothing of the size of the input beside it.
        length = torch.linalg.vector_norm(seen, dim=1, keepdim=True, dtype=torch.float32)
        rstd = (length.square() / seen.shape[1] + _SMALLEST).rsqrt()
        mean = torch.zeros((), device=seen.device).expand(rstd.shape)
        return Normal(Statistics(mean, rstd, self.size, tuple(rstd.shape)), describe(seen))


def of_places(tensor: Tensor) -> Places | None:
    """Return the places of a row of places; None: there is one, or too few channels have it.

    A pixel of an image is as large as its neighbours; what a sequence has behind its end is not.

    Example:
        >>> of_places(torch.zeros(2, 16, 50))
        Places(size=(2, 16, 50))
        >>> of_places(torch.zeros(2, 3, 50)) is None
        True
    """
    if tensor.dim() != _OF_SEQUENCES or not tensor.is_contiguous() or tensor.shape[2] == 1:
        return None
    is_worth_it = tensor.shape[1] * tensor.element_size() >= _LEAST_BYTES
    return Places(tuple(tensor.shape)) if is_worth_it else None


def of_rows(tensor: Tensor, group_size: int, *, of_planes: bool = False) -> Norm | None:
    """Return a norm of each row of a tensor; None: groups have parts of one row alone.

    A row is what lies together in memory along the last dimensions, of 32 bytes at least, and of
    64 elements in planes, as images are.

    Example:
        >>> of_rows(torch.zeros(4, 17, 96), 128).dims
        (2,)
        >>> of_rows(torch.zeros(4, 17, 128), 128) is None
        True
    """
    size, stride = tuple(tensor.shape), tensor.stride()
    dims, length, least = [], 1, least_row(tensor, of_planes=of_planes)
    for dim in sorted(range(len(size)), key=lambda d: stride[d]):
        if length >= least:
            break
        dims.append(dim)
        length *= size[dim]
    if length % group_size == 0 or length == tensor.numel() or not _has_each_once(tensor):
        return None
    return Norm(size, stride, size, tuple(sorted(dims)))


def least_row(tensor: Tensor, *, of_planes: bool) -> int:
    """Return how many elements lie together in the least row that has statistics of its own."""
    return _ROW_OF_PLANE if of_planes else _LEAST_BYTES // tensor.element_size()


def has_short_rows(tensor: Tensor) -> bool:
    """Tell whether statistics of each row would take as much as is gained, or more.

    Example:
        >>> [has_short_rows(torch.zeros(4, 9, n, dtype=torch.bfloat16)) for n in (15, 16)]
        [True, False]
    """
    return 0 < row_length(tensor) * tensor.element_size() < _LEAST_BYTES


class _View(NamedTuple):
    """Memory that has an input's elements, or their squares: the input's number, and how the memory
    saw it."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_copy: bool
    is_square: bool = False


class Readers:
    """The first norm that reads each of some tensors, or a copy or cast of it, by number.

    Where there is none, the first mean: it may be that of one which is written out. `planes` are
    those that a convolution, or a pool, reads as places that lie side by side in memory.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._norms: dict[int, Norm] = {}
        self._means: dict[int, Norm] = {}
        self._planes: set[int] = set()
        # By storage: memory that is used again is taken for what it was, and costs no precision.
        self._views = {
            storage_of(x): _View(i, tuple(x.shape), x.stride(), is_copy=False)
            for i, x in enumerate(tensors)
            if _has_each_once(x)
        }
        self._offsets = [x.storage_offset() for x in tensors]

    @property
    def found(self) -> dict[int, Norm]:
        return self._means | self._norms

    @property
    def planes(self) -> frozenset[int]:
        return frozenset(self._planes)

    def look_at(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Look at a call of the dispatcher."""
        is_square = name in _POWERS and _is_square(name, args)
        is_copy, is_mean = is_square or name in _COPIES, name in _SUMS or name == _LENGTH
        is_norm, is_spatial = name in NORMS, any(part in name for part in _SPATIAL)
        if not (is_copy or is_mean or is_norm or is_spatial):
            return
        view = self._view_of(args[0])
        if view is None or (view.is_square and not is_mean and not is_copy):
            return
        if is_spatial:
            if _is_of_planes(view):
                self._planes.add(view.number)
        elif is_mean:
            self._note_mean(view, name, args)
        elif not is_copy:
            self._note(view, name, args)
        elif result.is_contiguous() and result.is_floating_point():
            # Elements in the order of the sizes, as what was copied has them.
            view = view._replace(is_copy=True, is_square=is_square or view.is_square)
            self._views.setdefault(storage_of(result), view)

    def _view_of(self, x: Tensor) -> _View | None:
        """Return what a tensor has of an input: all its elements, in some order; else None."""
        view = self._views.get(storage_of(x)) if x.layout is strided else None  # others have none
        if view is None or x.numel() != prod(view.size) or not _has_each_once(x):
            return None
        if view.is_copy:
            return view if x.is_contiguous() else None
        if x.storage_offset() != self._offsets[view.number]:
            return None
        return view._replace(size=tuple(x.shape), stride=x.stride())

    def _note(self, view: _View, name: str, args: tuple[Any, ...]) -> None:
        size = tuple(args[0].shape)
        if name in _CHANNELS and size[0] > 1:
            parts = None if view.is_copy else (size, (0, *range(2, len(size))))
        else:
            parts = _parts(view.size, _length(name, args))
        if parts is not None:
            self._norms.setdefault(view.number, Norm(view.size, view.stride, *parts))

    def _note_mean(self, view: _View, name: str, args: tuple[Any, ...]) -> None:
        """Note a mean; of squares only across rows, and of short ones: others have groups."""
        is_square = view.is_square or name == _LENGTH
        if name not in _MEANS and not is_square:
            return
        x, *others = args[:1] + args[2:] if name == _LENGTH else args
        size = tuple(x.shape)
        given = others[0] if others and isinstance(others[0], (list, tuple)) else ()
        dims = tuple(sorted(dim % len(size) for dim in given if size))  # of a number none
        length = prod(size[dim] for dim in dims)
        fits = not view.is_copy or size == view.size
        if is_square and len(size) - 1 in dims and length >= _ROW:
            return
        if fits and _MEAN <= length < x.numel():
            self._means.setdefault(view.number, Norm(size, view.stride, size, dims))


def _is_of_planes(view: _View) -> bool:
    """Tell whether what is next in memory is another place, and not another channel."""
    moving = [(step, dim) for dim, step in enumerate(view.stride) if view.size[dim] > 1]
    return min(moving, default=(0, 0))[1] >= _FIRST_PLACE


def _is_square(name: str, args: tuple[Any, ...]) -> bool:
    if name == "aten::mul":
        return args[0] is args[1]
    return name == "aten::square" or (type(args[1]) in (int, float) and args[1] == 2)


def _length(name: str, args: tuple[Any, ...]) -> int:
    """Return how many elements in the order of the sizes are normalised together."""
    x: Tensor = args[0]
    if name in _ROWS:
        return prod(args[1])
    return x.numel() // (x.shape[0] * int(args[_GROUPS_AT]) if name in _GROUPS else x.shape[1])


def _parts(size: tuple[int, ...], length: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return sizes of which the last dimensions have that many elements, and those dimensions.

    Example:
        >>> _parts((2, 6, 4), 8)
        ((2, 3, 2, 4), (2, 3))
    """
    covered = 1
    for dim in reversed(range(len(size))):
        if covered * size[dim] < length:
            covered *= size[dim]
            continue
        inner = length // covered
        if inner * covered != length or size[dim] % inner:
            return None
        split = (*size[:dim], size[dim] // inner, inner, *size[dim + 1 :])
        return split, tuple(range(dim + 1, len(split)))
    return None


def _has_each_once(x: Tensor) -> bool:
    """Tell whether a tensor is a dense range of memory, in any order of dimensions."""
    geometry = describe(x)
    return geometry.whole and geometry.covered == x.numel() > 0
