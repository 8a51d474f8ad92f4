"""What stands for a gradient that was stepped in backward: to use it is an error that says so.

A parameter without a gradient is passed over, by clipping for example, which would do nothing and
say nothing. What stands for the gradient has its shape and type and no memory. It goes when the
round ends. Any thread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vramx.errors import OffloadError

TWICE = (
    "a parameter has got a second gradient before optimizer.step(): where steps are taken in "
    "backward, gradients cannot accumulate"
)
_SUMS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)  # autograd's


class Stepped(Tensor):
    """A gradient that is no more."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _types: Any, _args: Any = (), _kwargs: Any = None
    ) -> Any:
        if function in _SUMS:
            raise OffloadError(TWICE)
        raise OffloadError(
            f"{function} of a gradient whose parameter was stepped in backward already: what needs "
            "all gradients, as clipping by the norm and GradScaler, comes too late; leave it out "
            "(max_grad_norm=0 of a Trainer), or use in_backward=False"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<stepped in backward: a gradient of {tuple(self.shape)}, {self.dtype}>"


def mark(parameter: Tensor) -> None:
    """Have a parameter a Stepped for a gradient; none, if its class has gradients of its own."""
    plain = type(parameter) in (Tensor, torch.nn.Parameter) and parameter.layout is torch.strided
    parameter.grad = (
        _stand_in(parameter.shape, parameter.dtype, parameter.device) if plain else None
    )


def unmark(parameter: Tensor) -> None:
    """Have a parameter without a gradient where it has a Stepped."""
    if type(parameter.grad) is Stepped:
        parameter.grad = None


@lru_cache(maxsize=1024)
def _stand_in(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    return Tensor._make_wrapper_subclass(Stepped, shape, dtype=dtype, device=device)
