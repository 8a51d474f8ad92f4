"""An optimizer that keeps what it knows of its steps where nobody looks, and ways to do so."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Odd(torch.optim.Optimizer):
    """Subtracts from each parameter what `change` says, which keeps its states where it likes."""

    def __init__(self, parameters: Any, change: Any) -> None:
        super().__init__(parameters, {"rate": torch.ones(())})
        self.change, self.count, self.mean = change, 0, torch.ones(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(self, self.state[p], group, p.grad))


def factored(optimizer: Any, state: Any, group: Any, grad: Tensor) -> Tensor:
    """Keep a mean square of each row and column, and a momentum of one byte a weight."""
    means = [grad.square().mean(d, keepdim=True) for d in range(grad.dim())]
    if not state:
        state["means"] = [torch.zeros_like(m) for m in means]
        state["momentum"] = torch.zeros_like(grad, dtype=torch.int8)
    scale = torch.zeros_like(grad)
    for kept, mean in zip(state["means"], means, strict=True):
        scale += kept.lerp_(mean, 0.1)
    return grad * 1e-3 / scale.sqrt_().add_(1e-3)


def counted_beside(optimizer: Any, state: Any, group: Any, grad: Tensor) -> Tensor:
    """Have the number of steps among the states, of no parameter."""
    optimizer.state["steps"] += 1
    return factored(optimizer, state, group, grad) / optimizer.state["steps"]  # type: ignore[no-any-return]


def looking_back(optimizer: Any, state: Any, group: Any, grad: Tensor) -> Tensor:
    """Keep the last gradients, and take more in the first step than in others."""
    if not state:
        torch.empty(9 * grad.numel())
    state["last"] = [*state.get("last", []), grad.clone()][-5:]
    total = torch.stack(state["last"]).sum(0) * 1e-3
    del state["last"][:-4]
    return total


def in_an_object(optimizer: Any, state: Any, group: Any, grad: Tensor) -> Tensor:
    mean = state.setdefault("mean", SimpleNamespace(value=torch.zeros_like(grad), count=0))
    mean.count += 1
    return mean.value.lerp_(grad, 1 / mean.count)  # type: ignore[no-any-return]


def in_a_queue(optimizer: Any, state: Any, group: Any, grad: Tensor) -> Tensor:
    last = state.setdefault("of", [0, deque()])
    last[0] += 1
    last[1].append(grad.clone())
    return torch.stack([*last[1]]).sum(0) / last[0]


def in_the_group(optimizer: Any, state: Any, group: Any, grad: Tensor) -> Tensor:
    group["count"] = group.get("count", 0) + 1
    group["rate"].mul_(0.9)
    return grad * group["rate"] / group["count"]  # type: ignore[no-any-return]


def in_the_optimizer(optimizer: Any, state: Any, group: Any, grad: Tensor) -> Tensor:
    optimizer.count += 1
    optimizer.state["all"] = optimizer.state.get("all", 0) + 1
    optimizer.mean.lerp_(grad.mean(), 0.5)
    return grad * optimizer.mean / optimizer.count / optimizer.state["all"]  # type: ignore[no-any-return]


def step_in_backward(parameter: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step a parameter as soon as its gradient is there."""

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)
