"""What logits are before they are made, and what of it stays true under functions of torch.

A Product says how logits come from hidden states. Each function here knows one thing that models
and losses do with logits (casts to float32, views, rows of a slice, a bias, a factor, a soft cap,
the cross entropy), and returns the Product of its result, or the loss. What is not known raises
Unknown: the logits are made then (logits.py). No state; any thread; some tens of microseconds each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.fakes import PLAIN
from vramx.errors import LogitsNotMadeError
from vramx.nn.keeping import DTYPES
from vramx.nn.loss import REDUCTIONS, linear_cross_entropy

WAY_OUT = 'vramx.optimize(model, {"lm_head": "left", "*": "int8"}) has them made in each step'
# A factor that was divided by and multiplied with again is 1 but for this.
_ROUNDING = 1e-12


class Unknown(Exception):  # noqa: N818 - no error: it says that the logits are to be made
    """These arguments are not understood."""


@dataclass(frozen=True)
class Product:
    """What logits are: factor (rows weight^T + bias), and with a cap c, c tanh(that / c).

    Shape: rows (..., inputs), weight (classes, inputs), bias (classes,) or None. `autocast`: the
    type that autocast had the head compute in, None without autocast.
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    autocast: torch.dtype | None
    factor: float = 1.0
    cap: float | None = None

    @property
    def terms(self) -> tuple[Tensor, ...]:
        both = (self.rows, self.weight)
        return both if self.bias is None else (*both, self.bias)

    def cast(self) -> Any:
        """Return the context of the head's call."""
        kind, dtype = self.rows.device.type, self.autocast
        return torch.autocast(kind, dtype, enabled=dtype is not None)

    def make(self) -> Tensor:
        """Return what the head returned: rows weight^T + bias, without factor and cap.

        Raises:
            LogitsNotMadeError: the weight's memory was given back.
        """
        if self.weight.numel() and self.weight.untyped_storage().nbytes() == 0:
            raise LogitsNotMadeError(
                "the logits of this step were not made, and cannot be any more: the weight of the "
                f"head is sharded again; {WAY_OUT}"
            )
        with self.cast():
            return F.linear(*self.terms)

    def times(self, number: Any) -> Product:
        """Return what a multiple of the logits is."""
        if type(number) not in (int, float) or not math.isfinite(number) or number == 0:
            raise Unknown
        if self.cap is None:
            return replace(self, factor=self.factor * number)
        if number < 0:
            raise Unknown
        return replace(self, factor=self.factor * number, cap=self.cap * number)

    def scaled_terms(self) -> tuple[Tensor, Tensor | None]:
        """Return rows and bias with the factor in them."""
        if abs(self.factor - 1) < _ROUNDING:
            return self.rows, self.bias
        return self.rows * self.factor, None if self.bias is None else self.bias * self.factor


class Use(NamedTuple):
    """A function of logits: they are `product`, and look like a tensor on the device "meta"."""

    product: Product
    like: Tensor
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = {}

    def result(self, product: Product) -> Use:
        """Return the use with what it results in; torch's own error where it is a mistake."""
        return self._replace(product=product, like=self.function(self.like, *self.args))

    def argument(self) -> Any:
        """Return the only argument there is."""
        if len(self.args) != 1 or self.kwargs:
            raise Unknown
        return self.args[0]

    def check_alone(self) -> None:
        if self.args or self.kwargs:
            raise Unknown


def _cast(use: Use) -> Use:
    """Casts to float32, where that loses nothing, and to what the logits are already."""
    values = [*use.args, *use.kwargs.values()]
    dtypes = [each for each in values if isinstance(each, torch.dtype)]
    places = [torch.device(each) for each in values if isinstance(each, (torch.device, str))]
    own = use.product.rows.device
    if len(dtypes) + len(places) < len(values) or any(place != own for place in places):
        raise Unknown
    wanted = torch.float32 if use.function is Tensor.float else next(iter(dtypes), use.like.dtype)
    if wanted != use.like.dtype and (
        wanted != torch.float32 or torch.promote_types(wanted, use.like.dtype) != wanted
    ):
        raise Unknown
    return Use(use.product, use.like, Tensor.to, (wanted,)).result(use.product)


def _contiguous(use: Use) -> Use:
    use.check_alone()
    return use.result(use.product)


def _view(use: Use) -> Use:
    """Other shapes with the classes last."""
    sizes = use.args[0] if len(use.args) == 1 and not isinstance(use.args[0], int) else use.args
    if use.kwargs or not isinstance(sizes, (tuple, list)):
        raise Unknown
    if not all(isinstance(size, int) for size in sizes):
        raise Unknown
    found = use.result(use.product)
    shape, rows = found.like.shape, use.product.rows
    if not shape or shape[-1] != use.like.shape[-1]:
        raise Unknown
    return found._replace(
        product=replace(use.product, rows=rows.reshape(*shape[:-1], rows.shape[-1]))
    )


def _index(use: Use) -> Use:
    """Basic indices or a mask of rows, with all classes."""
    index = use.argument()
    if type(index) in PLAIN and index.dtype == torch.bool:
        return _masked(use, index)
    items = index if isinstance(index, tuple) else (index,)
    basic = all(item is Ellipsis or type(item) in (int, slice) for item in items)
    reaches_classes = basic and (Ellipsis in items or len(items) == use.like.dim())
    if not basic or (reaches_classes and items[-1] not in (Ellipsis, slice(None))):
        raise Unknown
    return use.result(replace(use.product, rows=use.product.rows[index]))


def _masked(use: Use, mask: Tensor) -> Use:
    """Rows where a mask is true: those of a text, say, but for what it was padded with."""
    if not 0 < mask.dim() < use.like.dim():
        raise Unknown
    mask = mask.clone()  # as it is now
    rows = use.product.rows[mask]
    like = use.like.new_empty((*rows.shape[:-1], use.like.shape[-1]))
    return use._replace(product=replace(use.product, rows=rows), like=like, args=(mask,))


def _add(use: Use) -> Use:
    """A number for each class: a bias, which some models have in a buffer beside the head."""
    other, product = use.argument(), use.product
    if type(other) not in PLAIN or product.cap is not None or product.factor != 1:
        raise Unknown
    if other.dtype != product.weight.dtype or other.device != product.rows.device:
        raise Unknown
    is_of_classes = other.dim() > 0 and other.shape[-1] == other.numel() == use.like.shape[-1]
    if not is_of_classes or other.dim() > use.like.dim():
        raise Unknown
    # As it is now: it may be written before the loss is computed.
    other = other.clone()
    added = other.flatten()
    bias = added if product.bias is None else product.bias + added
    like = use.function(use.like, other.to("meta"))
    return use._replace(product=replace(product, bias=bias), like=like, args=(other,))


def _multiply(use: Use) -> Use:
    return use.result(use.product.times(use.argument()))


def _divide(use: Use) -> Use:
    number = use.argument()
    if type(number) not in (int, float) or number == 0:
        raise Unknown
    return use.result(use.product.times(1 / number))


def _tanh(use: Use) -> Use:
    use.check_alone()
    if use.product.cap is not None:
        raise Unknown
    return use.result(replace(use.product, cap=1.0))


def _cross_entropy(use: Use) -> Tensor:
    """Return the cross entropy of rows of logits, computed without them."""
    product, like, options = use.product, use.like, dict(use.kwargs)
    target: Any = use.args[0] if len(use.args) == 1 else None
    smoothing = options.pop("label_smoothing", 0.0)
    ignored, reduction = options.pop("ignore_index", -100), options.pop("reduction", "mean")
    if reduction not in REDUCTIONS or any(each is not None for each in options.values()):
        raise Unknown
    if like.dim() != 2 or type(target) not in PLAIN or target.shape != like.shape[:1]:
        raise Unknown
    if target.dtype != torch.int64 or target.device != product.rows.device:
        raise Unknown
    if any(term.dtype not in DTYPES for term in product.terms):
        raise Unknown
    is_cast = torch.is_autocast_enabled(target.device.type) and like.dtype != torch.float64
    with product.cast():
        rows, bias = product.scaled_terms()
        loss = linear_cross_entropy(
            rows, product.weight, target, bias, ignore_index=ignored, reduction=reduction,
            label_smoothing=smoothing, logit_softcap=product.cap,
        )  # fmt: skip
    return loss.to(torch.float32 if is_cast else like.dtype)


KNOWN: dict[Any, Callable[[Use], Use | Tensor]] = {
    **dict.fromkeys((Tensor.float, Tensor.to), _cast),
    Tensor.contiguous: _contiguous,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
    Tensor.__getitem__: _index,
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), _add),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _multiply),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _divide),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    F.cross_entropy: _cross_entropy,
}
