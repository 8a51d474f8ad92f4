"""Logits that are not made: a stand-in for what a language model's head returns in training.

What models and their losses do with logits before the cross entropy is remembered, and the cross
entropy itself is linear_cross_entropy(), which makes them in chunks (logits_product.py). Any other
use makes them once, as the model would have, and goes on with that tensor: slower, and told of
where an optimizer has written into the head's weight since. So the stand-in in a model's result is
as good as logits, and costs the hidden states while it lives.

It is no Tensor: what looks for tensors in results (DDP, FSDP, accelerate) passes it by. Any thread,
each with stand-ins of its own; a warning names what makes logits, once a process.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vramx.errors import LogitsNotMadeError, warn_once
from vramx.nn.arguments import autocast_dtype
from vramx.nn.logits_product import KNOWN, WAY_OUT, Product, Unknown, Use
from vramx.patch.torch_functions import called
from vramx.recompute.tensors import version_of

# What a stand-in says of logits without making them.
_FACTS = frozenset(
    (
        *("shape", "dtype", "ndim", "size", "dim", "numel", "nelement", "element_size", "itemsize"),
        *("nbytes", "layout", "is_floating_point", "is_complex", "stride", "is_contiguous"),
        *("is_sparse", "is_quantized", "is_nested"),
    )
)
# What backward would leave there, had the loss been computed from them.
_OF_BACKWARD = frozenset(("grad", "retain_grad", "retains_grad", "register_hook"))
_ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_IN_PLACE = frozenset(f"__i{name}__" for name in _ARITHMETIC)
_OPERATORS = (
    *(f"__{kind}{name}__" for name in _ARITHMETIC for kind in ("", "r")),
    *_IN_PLACE,
    *("__neg__", "__pos__", "__abs__", "__invert__", "__bool__", "__float__", "__int__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__index__", "__complex__"),
    *("__getitem__", "__setitem__", "__iter__", "__reversed__", "__contains__", "__format__"),
)


class _Family:
    """The stand-ins for one product and for what was made of it: they may share memory."""

    def __init__(self, tells: bool, weight: Tensor) -> None:
        self.tells = tells
        self._version = version_of(weight)
        self.is_made = False  # whether any of them is
        self._members: list[weakref.ref[Logits]] = []

    def add(self, member: Logits) -> None:
        self._members.append(weakref.ref(member))

    def check(self, weight: Tensor) -> None:
        """Say once that logits were made from a weight that is another than in the forward pass."""
        if version_of(weight) != self._version:
            warn_once(
                "logits of a language model in training were first used after the weight of its "
                "head was written into, as by optimizer.step(): they are those of the weight as it "
                f"is now; use them before that, or {WAY_OUT}",
                stacklevel=5,
            )

    def make_all(self) -> None:
        for reference in self._members:
            member = reference()
            if member is not None:
                member.made()


class Logits:
    """The stand-in. What a Tensor can be asked, and given to, it can be."""

    def __init__(
        self, make: Callable[[], Tensor], like: Tensor, product: Product, family: _Family
    ) -> None:
        self._make = make
        self._like = like  # on the device "meta"
        self._product = product
        self._family = family
        self._made: Tensor | None = None
        family.add(self)

    @classmethod
    def of(cls, rows: Tensor, weight: Tensor, bias: Tensor | None, tells: bool = True) -> Logits:
        """Stand for what torch.nn.functional.linear() returns.

        Args:
            rows: (..., inputs), of the type of weight, unless autocast casts both.
            weight: (classes, inputs).
            bias: (classes,) or None.
            tells: whether a VramxWarning names what makes the logits.

        Memory: refers to its arguments, and to what it is asked to make.
        """
        dtype = autocast_dtype(rows)
        is_cast = torch.is_autocast_enabled(rows.device.type)
        product = Product(rows, weight, bias, dtype if is_cast else None)
        shape = (*rows.shape[:-1], weight.shape[0])
        like = torch.empty(shape, dtype=dtype, device="meta")
        return cls(product.make, like, product, _Family(tells, weight))

    @property
    def is_made(self) -> bool:
        """Whether something has used the logits themselves."""
        return self._made is not None

    @property
    def family_is_made(self) -> bool:
        """Whether something has used the logits, or what was made of them."""
        return self._family.is_made

    def made(self) -> Tensor:
        """Return the logits, a part of the graph that the hidden states are of.

        Raises:
            LogitsNotMadeError: the weight of the head is not there any more.
        """
        if self._made is None:
            # As in the forward pass, wherever they are first used.
            with torch.inference_mode(mode=False), torch.enable_grad():
                self._made = self._make()
            self._family.is_made = True
            self._family.check(self._product.weight)
        return self._made

    @property
    def device(self) -> torch.device:
        return self._product.rows.device

    @property
    def requires_grad(self) -> bool:
        return any(term.requires_grad for term in self._product.terms)

    def use(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return a function of logits that are not made: another stand-in, or the loss.

        Raises:
            Unknown: it is none that can be computed without them.
        """
        understand = KNOWN.get(function)
        if understand is None or self.is_made:
            raise Unknown
        found = understand(Use(self._product, self._like, function, args, kwargs))
        if isinstance(found, Tensor):
            return found
        make = functools.partial(_apply, self, found.function, found.args)
        return Logits(make, found.like, found.product, self._family)

    def make_for(self, name: str, kwargs: Any) -> None:
        """Make the logits for a function, which may write them, and say so once."""
        if not self.is_made and self._family.tells:
            self.made()
            warn_once(
                f"{name} of a language model's logits in training: {tuple(self._like.shape)} were "
                "made for it, as they are without vramx; the loss alone needs none",
                about=f"logits.{name}",
            )
        ends_so = name.endswith("_") and not name.startswith("__")
        if ends_so or name in _IN_PLACE or name == "__setitem__" or "out" in kwargs:
            self._family.make_all()  # from what they are now

    def __len__(self) -> int:
        return len(self._like)

    def __repr__(self) -> str:
        if self._made is not None:
            return repr(self._made)
        return f"<logits of shape {tuple(self._like.shape)}, made when they are used>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        found = getattr(Tensor, name)
        if name in _FACTS:
            return getattr(self._like, name)
        if name in _OF_BACKWARD and not self.is_made:
            raise LogitsNotMadeError(
                f"{name} of logits that were not made: the loss is computed from hidden states, in "
                f"chunks; {WAY_OUT}"
            )
        if callable(found):
            return functools.partial(_call, found, self)
        return getattr(self.made(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(called(function, sys._getframe(1)), *args, **(kwargs or {}))


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Any, *args: Any) -> Any:
        return _call(getattr(Tensor, name), self, *args)

    return operator


for _name in _OPERATORS:  # Python looks for them on the class alone
    setattr(Logits, _name, _operator(_name))


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch, some of whose arguments are stand-ins."""
    if args and isinstance(args[0], Logits):
        with contextlib.suppress(Unknown):
            return args[0].use(function, args[1:], kwargs)
    name = getattr(function, "__name__", str(function))
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Logits):
            leaf.make_for(name, kwargs)
    args, kwargs = tree_map(lambda x: x.made() if isinstance(x, Logits) else x, (args, kwargs))
    return function(*args, **kwargs)


def _apply(logits: Logits, function: Callable[..., Any], args: Any) -> Tensor:
    result: Tensor = function(logits.made(), *args)
    return result
