"""Parameters and buffers that a region's modules have in its first run, for one that recomputes it.

torch.func.functional_call, and libraries that learn to learn, give a module other tensors for the
length of a call. When backward recomputes the call these are gone, and the module has its own
again: the gradient would be of another function. The recomputation gets the tensors back.

Those of a class of their own, as of a sharding library, come and go by that library's hooks, in a
recomputation too. Holds what the graph or the module holds as well. A call costs a look at each
module of the region.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)
_Members = dict[str, Any]  # of parameters, or of buffers


class Members:
    """The tensors of modules as they are now, by name."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._then: list[tuple[_Members, _Members]] = [
            (own, dict(own))
            for module in modules
            for own in (module._parameters, module._buffers)
            if own
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have the modules the tensors of then meanwhile, where they have others now."""
        moved: list[tuple[_Members, str, Any]] = []
        for own, then in self._then:
            for name, tensor in then.items():
                now = own.get(name)
                if now is not tensor and type(now) in _PLAIN and type(tensor) in _PLAIN:
                    moved.append((own, name, now))
                    own[name] = tensor
        try:
            yield
        finally:
            for own, name, now in moved:
                own[name] = now
