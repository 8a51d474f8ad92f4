"""What stands for a gradient that was stepped in backward: to use it is an error that says so.

A parameter without a gradient is passed over, by clipping for example, which would do nothing and
say nothing. What stands for the gradient has its shape and type and no memory, and goes when the
round ends. A norm that is asked for a log alone, as a Trainer does that is told not to clip, passes
over it. Any thread.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vramx.errors import OffloadError

TWICE = (
    "a parameter has got a second gradient before optimizer.step(): where steps are taken in "
    "backward, gradients cannot accumulate"
)
GRAPH_KEPT = (
    "backward(retain_graph=True) where steps are taken in backward: a second pass through its "
    "graph would meet stepped weights, which torch calls modified; add the losses for one, "
    "or use in_backward=False"
)
NO_ZEROS = (
    "zero_grad(set_to_none=False) where steps are taken in backward: gradients are gone after it, "
    "and a parameter that a backward does not reach is not stepped, as with set_to_none=True"
)
_aten = torch.ops.aten
_SUMS = (_aten.add_.Tensor, _aten.add.Tensor)  # autograd's
# Of torch.nn.utils.clip_grad_norm_, whose largest norm stands in one of so many frames.
_NORMS = (_aten.linalg_vector_norm, _aten._foreach_norm)
_FACTORS = (_aten.mul_, _aten._foreach_mul_)
_FRAMES = 10


class Stepped(Tensor):
    """A gradient that is no more."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _types: Any, args: Any = (), _kwargs: Any = None
    ) -> Any:
        if function in _SUMS:
            raise OffloadError(TWICE)
        packet = function.overloadpacket
        if packet in (*_NORMS, *_FACTORS) and _clips_nothing():
            first, *others = args
            each = first if isinstance(first, list | tuple) else [first]
            if packet in _FACTORS:
                for left in (x for x in each if type(x) is not cls):
                    left.mul_(*others)
                return None if each is first else first
            norms = [_zero(x) if type(x) is cls else x.norm(*others[:1]) for x in each]
            return norms if each is first else norms[0]
        raise OffloadError(
            f"{function} of a gradient whose parameter was stepped in backward already: what needs "
            "all gradients, as clipping by the norm and GradScaler, comes too late; leave it out "
            "(max_grad_norm=0 of a Trainer), or use in_backward=False"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<stepped in backward: a gradient of {tuple(self.shape)}, {self.dtype}>"


def _clips_nothing() -> bool:
    """Tell whether clip_grad_norm_ is called for the norm alone: the largest is infinite."""
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        frame = frame and frame.f_back
        if frame is not None and frame.f_code.co_name == "clip_grad_norm_":
            return math.isinf(frame.f_locals.get("max_norm", 0.0))
    return False


def _zero(stepped: Stepped) -> Tensor:
    return torch.zeros((), dtype=stepped.dtype, device=stepped.device)


def mark(parameter: Tensor) -> None:
    """Have a parameter a Stepped for a gradient; none, if its class has gradients of its own."""
    parameter.grad = None
    if type(parameter) in (Tensor, torch.nn.Parameter) and parameter.layout is torch.strided:
        parameter.grad = _stand_in(parameter.shape, parameter.dtype, parameter.device)


def unmark(parameter: Tensor) -> None:
    """Have a parameter without a gradient where it has a Stepped."""
    if type(parameter.grad) is Stepped:
        parameter.grad = None


@lru_cache(maxsize=1024)
def _stand_in(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    return Tensor._make_wrapper_subclass(Stepped, shape, dtype=dtype, device=device)
