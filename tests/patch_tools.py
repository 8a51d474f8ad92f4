"""What changes and wraps a model in the tests of patches: our ways, and others' by mechanism.

The stand-ins do what the named library does to a forward, so that the kind is tested without it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import vramx

WIDTH = 16
OPTIONS = {"min_bytes": 0}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the input."""
        return x + self.down(nn.functional.gelu(self.up(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    # Of smooth operations alone: what is recomputed keeps the inputs of others exactly.
    layer = nn.TransformerEncoderLayer(
        WIDTH, 2, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True
    )
    return nn.Sequential(Plain(), layer)


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8, WIDTH)


def train(net: nn.Module) -> None:
    net(inputs()).square().mean().backward()


def states(net: nn.Module) -> list[tuple[type, dict[str, Any]]]:
    return [(type(part), dict(part.__dict__)) for part in net.modules()]


def gradients(net: nn.Module) -> list[torch.Tensor]:
    net.zero_grad()
    train(net)
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def error(found: list[Any], expected: list[Any]) -> float:
    """Return the error of all gradients together, relative to their norm."""
    assert len(found) == len(expected) > 0
    both = [torch.cat([gradient.flatten() for gradient in each]) for each in (found, expected)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def is_equal(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def pack(net: nn.Sequential) -> None:
    for block in net:
        vramx.compressed_activations(block, **OPTIONS)


def recompute(net: nn.Sequential) -> None:
    small = vramx.Compression(**OPTIONS)
    vramx.checkpoint_modules(net, where=(Plain, nn.TransformerEncoderLayer), level=small)


def fuse(net: nn.Sequential) -> None:
    vramx.optimize(net, "int8")


OURS: dict[str, Callable[[nn.Sequential], None]] = {
    "packed": pack,
    "recomputed": recompute,
    "fused": fuse,
}


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    module.hook_calls += 1
    return module._old_forward(*args, **kwargs)


def hook(net: nn.Sequential) -> None:
    """As accelerate.hooks.add_hook_to_module: a partial over a method kept in the module."""
    for block in net:
        block.hook_calls = 0
        block._old_forward = old = block.forward
        block.forward = functools.update_wrapper(functools.partial(_hooked_forward, block), old)


def unhook(net: nn.Sequential) -> None:
    for block in net:
        block.forward = block._old_forward
        del block._old_forward, block.hook_calls


class _Converted:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self.model_forward = forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model_forward(*args, **kwargs)


def _converting(forward: Callable[..., Any]) -> Callable[..., Any]:
    forward = _Converted(forward)

    def converted(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    converted.__wrapped__ = forward  # type: ignore[attr-defined]
    return converted


def prepare(net: nn.Sequential) -> None:
    """As Accelerator.prepare: methods over the function of the forward, wrapped twice."""
    for block in net:
        block._original_forward = block.forward
        if hasattr(block.forward, "__func__"):
            inner = torch.autocast("cpu", enabled=False)(block.forward.__func__)
            block.forward = types.MethodType(_converting(inner), block)
        else:
            block.forward = _converting(block.forward)


def wrap(net: nn.Sequential) -> None:
    """As a program's own decorator of a forward."""
    for block in net:
        forward = block.forward
        block.forward = lambda *args, _forward=forward, **kwargs: _forward(*args, **kwargs)


class _Timed:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self.inner = forward
        self.calls = 0

    def measure(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


def time(net: nn.Sequential) -> None:
    """As a profiler: a method of an object that keeps the forward."""
    for block in net:
        block.forward = _Timed(block.forward).measure


class Sharded:
    """As torch.distributed.fsdp.FSDPModule: a class put before the module's own."""


def shard(net: nn.Sequential) -> None:
    for block in net:
        cls = type(block)
        block.__class__ = type(f"Sharded{cls.__name__}", (Sharded, cls), {})


OTHERS: dict[str, Callable[[nn.Sequential], None]] = {
    "hooked": hook,
    "prepared": prepare,
    "wrapped": wrap,
    "timed": time,
    "sharded": shard,
}


class Wrapper(nn.Module):
    """As DistributedDataParallel and others: a module around the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
