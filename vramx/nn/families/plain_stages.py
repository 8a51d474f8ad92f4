"""The tensors of a block that is read: by the operation that makes each, with numbered elements.

Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vramx.nn.families.plain_plan import Norm, NotPlainError

CALLED = "module"  # one that has no parts, and is called as it is
AFTER = ("dropout", CALLED)


@dataclass(eq=False)
class Stage:
    """A tensor of the block, by the operation that makes it."""

    kind: str
    what: Any = None
    inputs: tuple[Stage, ...] = ()
    size: int = 0  # how many elements it has


@dataclass(eq=False)
class Value:
    """Elements of a stage, by their numbers; those of q or k may be multiplied by a factor."""

    stage: Stage
    index: Tensor
    factor: float = 1.0

    @property
    def width(self) -> int:
        return self.index.shape[-1]

    def moved(self, index: Tensor) -> Value:
        return replace(self, index=index)


@dataclass(eq=False)
class Scores:
    """A product of queries and keys, before or after its softmax and a dropout."""

    q: Value
    k: Value
    factor: float
    is_causal: bool = False
    fill: float = -torch.inf  # what a mask has put in, multiplied since
    is_soft: bool = False
    dropout: str | float | None = None


@dataclass(eq=False)
class Parameter:
    """A parameter, by its path."""

    path: str
    shape: torch.Size


def expect(stage: Stage, *kinds: str) -> Stage:
    if stage.kind not in kinds:
        raise NotPlainError(f"it has {stage.kind} where a plain block has {kinds[0]}")
    return stage


def norm_of(stage: Stage) -> Norm:
    return stage.what if isinstance(stage.what, Norm) else Norm(stage.what)


def residual(stage: Stage) -> tuple[Stage, Stage]:
    """Return what a sum adds to, and what it adds."""
    a, b = expect(stage, "add").inputs
    return (b, a) if a.kind in ("linear", *AFTER) else (a, b)


def used_in(stage: Stage) -> set[Stage]:
    """Return a stage and all that it is made of."""
    found, waiting = {stage}, [stage]
    while waiting:
        new = [each for each in waiting.pop().inputs if each not in found]
        found.update(new)
        waiting += new
    return found


def behind(stage: Stage, *kinds: str) -> tuple[tuple[str | nn.Module, ...], Stage]:
    """Return what a result goes through, in order, and the stage before it."""
    after: list[str | nn.Module] = []
    while stage.kind in (kinds or AFTER):
        after.insert(0, stage.what)
        (stage,) = stage.inputs
    return tuple(after), stage
