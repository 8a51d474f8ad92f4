"""What stands in a graph for a saved tensor, and how it becomes a tensor again.

Three kinds: a Reference to memory that lives anyway, or is kept as it is; a Restored, which shares
a payload (a packed buffer or a compact copy) with whoever saved the same data; a Pending, which
becomes one of these when the call that saves it ends. Else nothing here is changed after it was
made, so that a graph may be run any number of times. Decides nothing.

DecodedCopies keeps one decoded copy a device between consecutive users of one payload, as q, k and
v projections are in backward. Thread-safe: one lock, never held while something is decoded.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch

from vramx.compression.codec.geometry import Geometry, restore, shape_of, spread
from vramx.compression.codec.mapping import Mapping
from vramx.compression.config import MASK_BITS, Format
from vramx.compression.lifetime import current_stream, outlive
from vramx.errors import ModifiedInPlaceError


class Payload(Protocol):
    """Kept data, which stands for a flat range of elements."""

    @property
    def nbytes(self) -> int: ...


class Reference:
    """Memory that is kept as it is. torch checks no version behind hooks, so this does."""

    __slots__ = ("__weakref__", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A leaf by itself, so that a sharding library that swaps its data finds it; a view of a
        # parameter too, whose history is views. All else detached: of an operation's result the
        # graph would hold itself. Both share the version counter.
        if not tensor.is_leaf:
            base = tensor._base
            if base is None or not base.is_leaf or not base.requires_grad:
                tensor = tensor.detach()
        self._tensor = tensor
        self._version = tensor._version

    def open(self) -> torch.Tensor:
        tensor = self._tensor
        if tensor._version != self._version:
            check_version(tensor, self._version)
        return tensor


def check_version(tensor: torch.Tensor, expected: int) -> None:
    """Raise where a tensor is not at the version at which it was saved."""
    if tensor._version != expected:
        raise ModifiedInPlaceError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {tensor.type()} {list(shape_of(tensor))} is at version {tensor._version}; "
            f"expected version {expected} instead"
        )


class Copy:
    """A compact copy of a view, so that the rest of its storage can be freed."""

    __slots__ = ("elements", "version")

    def __init__(self, elements: torch.Tensor, *, compact: bool) -> None:
        self.elements = elements if compact else elements.clone()
        self.version = self.elements._version

    @property
    def nbytes(self) -> int:
        return self.elements.numel() * self.elements.element_size()


class Codec(Protocol):
    """Turns elements into a payload, and that into a flat range of them.

    The codec's own pair, or one that offloads. Given is a contiguous tensor, of any shape and
    with its graph, which is only read.
    """

    def encode(
        self, elements: torch.Tensor, format: Format, mapping: Mapping | None = None
    ) -> Payload: ...

    def decode(self, payload: Any, geometry: Geometry | None = None) -> torch.Tensor:
        """Return them; where a geometry is given, they may have its size and stride already."""


class Holding:
    """One payload and its users. A table may find it while a user lives; it holds neither."""

    __slots__ = ("__weakref__", "codec", "format", "payload", "users")

    def __init__(self, payload: Payload, codec: Codec | None, format: Format | None = None) -> None:
        self.payload = payload
        self.codec = codec
        self.format = format
        self.users: list[weakref.ref[Restored]] = []

    def keep(self, elements: torch.Tensor) -> None:
        """Have the elements themselves in place of what was packed of them."""
        self.payload, self.codec, self.format = Copy(elements, compact=True), None, None

    def others(self, user: Restored) -> list[Restored]:
        """Return the live users that may share a decoded copy with `user`."""
        if len(self.users) == 1:
            return []
        alive = [ref() for ref in self.users]
        return [u for u in alive if u is not None and u is not user and u.shared]


class Restored:
    """One user of a payload: the view of it that the operation saved.

    `stride`: None where the operation is torch's own, which takes any and does not write into what
    it saved: it may be given memory that others read too. An autograd.Function may write, through a
    kernel that no version counter sees, and gets its own; it may have noted the strides in forward,
    and a compiled graph insists on them: it gets those too, holes included.
    """

    __slots__ = ("__weakref__", "geometry", "holding", "stride")

    def __init__(
        self, holding: Holding, geometry: Geometry, stride: tuple[int, ...] | None
    ) -> None:
        self.holding = holding
        self.geometry = geometry
        self.stride = stride
        holding.users.append(weakref.ref(self))

    @property
    def shared(self) -> bool:
        return self.stride is None

    @property
    def is_approximate(self) -> bool:
        """Whether what is given back may differ from what was saved."""
        return self.holding.format is not None and self.holding.format.bits != MASK_BITS

    def open(self) -> torch.Tensor:
        found = self._compact()
        return found if self.stride is None else spread(found, self.stride)

    def _compact(self) -> torch.Tensor:
        holding, geometry = self.holding, self.geometry
        payload = holding.payload
        if not isinstance(payload, Copy):
            elements = decoded_copies.take(self)
            return restore(elements, geometry) if elements.dim() == 1 else elements
        check_version(payload.elements, payload.version)
        outlive(payload.elements)
        elements = payload.elements if self.shared else payload.elements.clone()
        return restore(elements, self.geometry)


class Pending:
    """Stands for a tensor until it is known how it is kept, which is exactly, or else packed."""

    __slots__ = ("__weakref__", "held")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.held: Reference | Restored = Reference(tensor)

    def open(self) -> torch.Tensor:
        return self.held.open()


class _Slot:
    """A decoded copy, whose it is, and who is still to come for it."""

    __slots__ = ("age", "copy", "holding", "stream", "version", "waiting")

    def __init__(self, holding: Holding, copy: torch.Tensor) -> None:
        self.holding = weakref.ref(holding)
        self.copy = copy
        self.version = copy._version
        self.stream = current_stream(copy)
        self.waiting: set[weakref.ref[Restored]] = set()
        self.age = 0

    def fits(self, holding: Holding) -> bool:
        """Whether the copy is that payload's, is safe to read here and now, and was not changed."""
        unchanged = self.copy._version == self.version
        return self.holding() is holding and unchanged and self.stream == current_stream(self.copy)


class DecodedCopies:
    """At most one decoded copy a device, kept from one user of a payload for the next.

    It goes when its last user has come or died, when the next shared payload is decoded, and when
    REACH other tensors were decoded since it was used, so that a skip connection holds nothing.
    """

    REACH = 8

    def __init__(self) -> None:
        # Reentrant: a weak reference may die, and call _forget, anywhere that allocates.
        self._lock = threading.RLock()
        self._slots: dict[torch.device, _Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, user: Restored) -> torch.Tensor:
        """Return the decoded range of a user's payload, from the slot where it is there."""
        holding = user.holding
        assert holding.codec is not None
        others = holding.others(user) if user.shared else []
        if not self._slots and not others:
            return holding.codec.decode(holding.payload, user.geometry)
        found = self._find(user) if user.shared else None
        if found is not None:
            return found
        copy = holding.codec.decode(holding.payload)
        self._keep(copy, holding, others)
        return copy

    def _find(self, user: Restored) -> torch.Tensor | None:
        with self._lock:
            for device, slot in self._slots.items():
                if slot.holding() is not user.holding:
                    continue
                if not slot.fits(user.holding):
                    return None
                slot.waiting.discard(weakref.ref(user))
                slot.age = 0
                if not slot.waiting:
                    del self._slots[device]
                return slot.copy
        return None

    def _keep(self, copy: torch.Tensor, holding: Holding, others: list[Restored]) -> None:
        device = copy.device
        with self._lock:
            if others:
                slot = _Slot(holding, copy)
                slot.waiting = {weakref.ref(user, self._forget) for user in others}
                self._slots[device] = slot
                return
            old = self._slots.get(device)
            if old is not None:
                old.age += 1
                if old.age > self.REACH:
                    del self._slots[device]

    def _forget(self, dead: weakref.ref[Restored]) -> None:
        with self._lock:
            for device, slot in list(self._slots.items()):
                slot.waiting.discard(dead)
                if not slot.waiting:
                    del self._slots[device]


decoded_copies = DecodedCopies()
