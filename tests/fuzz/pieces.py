"""What programs use and torch does not have: Functions and operators that vramx does not know.

Each is differentiable twice, and its backward says what an error of the saved value does to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Through which a program calls vramx; run.py sets it before each run.
api: Any = None


class Recomputed(nn.Module):
    """A region that checkpoint_modules() finds by its class."""


class Decorated(nn.Module):
    """A region that is packed by itself."""


def unit(x: Tensor) -> Tensor:
    """Return rows of mean 0 and deviation 1."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def halve_array(x: Tensor) -> None:
    """Write through an array of numpy, which has no bfloat16: as the integers of its bits."""
    bits = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    halves = (x.detach() * 0.5).view(bits).numpy()
    x.detach().view(bits).numpy()[...] = halves


class Smooth(torch.autograd.Function):
    """x * sin(x): its backward is smooth in what it saved, but nobody says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.sin() + x * x.cos())


class Positions(torch.autograd.Function):
    """Move rows to places that floating numbers give: an error moves them elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.gather(1, places.long().clamp(0, x.shape[1] - 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        at = places.long().clamp(0, grad.shape[1] - 1)
        return torch.zeros_like(grad).scatter_add(1, at, grad), None


class Compares(torch.autograd.Function):
    """A comb: the slope alternates where the argument crosses a twentieth."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 + torch.floor(x * 20).remainder(2))


class Divides(torch.autograd.Function):
    """sign(x) * log(1 + |x| / 0.05) / 5: backward divides by what may be near zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign() * (x.abs() / 0.05).log1p() * 0.2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 0.2 * grad / (x.abs() + 0.05)


class Overwrites(torch.autograd.Function):
    """Its backward writes into what it saved, past the version: others must not see that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = 2 * x * grad
        x.data.zero_()
        return result


@torch.library.custom_op("fuzz::comb", mutates_args=())
def comb(x: Tensor) -> Tensor:
    return x.clone()


@comb.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _comb_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * (1 + torch.floor(x * 20).remainder(2))


comb.register_autograd(_comb_backward, setup_context=_save)


@torch.library.custom_op("fuzz::bend", mutates_args=())
def bend(x: Tensor) -> Tensor:
    return x * x.tanh()


@bend.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _bend_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    t = x.tanh()
    return grad * (t + x * (1 - t * t))


bend.register_autograd(_bend_backward, setup_context=_save)


@torch.library.custom_op("fuzz::damp", mutates_args=("x",))
def damp(x: Tensor) -> None:
    x.mul_(0.5)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.tanh(x) + torch.tanh(x).exp()


# Its first run only looks at types, with autocast and without. From the second on backward is a
# graph, which rounds otherwise.
for _enabled in (False, False, True, True):
    with torch.autocast("cpu", torch.bfloat16, enabled=_enabled):
        scripted(torch.ones(1, requires_grad=True)).sum().backward()


def on_side_stream(function: Any, x: Tensor) -> Tensor:
    """Run a layer on another stream, whose input nobody else holds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x = x * 1
    with torch.cuda.stream(side):
        result = function(x)
    del x
    torch.cuda.current_stream().wait_stream(side)
    return result
