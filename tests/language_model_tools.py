"""What tests of the head and the loss share: the stand-in, gradients, and who makes logits."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from optimize_tools import error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vramx import errors
from vramx.nn import operators_loss

TOKENS, CLASSES = 24, 50
_NAME = "transformers.models.stand_in.modeling_stand_in"


@pytest.fixture
def told_anew() -> None:
    """Warn of what was warned of before; a file names it in `__all__`."""
    errors._said.clear()


def stand_in() -> Any:
    """Return the module with the stand-in's classes."""
    if _NAME not in sys.modules:
        path = Path(__file__).with_name("stand_in_language_model.py")
        spec = importlib.util.spec_from_file_location(_NAME, path)
        sys.modules[_NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_NAME])
    return sys.modules[_NAME]


def language_model(**options: Any) -> Any:
    torch.manual_seed(0)
    module = stand_in()
    return module.StandInForCausalLM(module.Config(**options)).train()


def call_of(rows: int = 2, tokens: int = TOKENS, classes: int = CLASSES) -> dict[str, Tensor]:
    """Return ids and labels, some of which count for nothing."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, classes, (rows, tokens), generator=generator)
    labels = torch.randint(3, classes, (rows, tokens), generator=generator)
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module, call: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return what a model returns, and the gradients of its loss."""
    model.zero_grad()
    result: Any = model(**call)
    loss = result[0] if isinstance(result, tuple) else result.loss
    loss.backward()
    return result, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def largest_error(model: nn.Module, original: nn.Module, call: dict[str, Any]) -> float:
    """Return the largest relative error of the loss and of all gradients.

    One that is zero but for rounding, as that of a key's bias, is compared with the largest.
    """
    (result, found), (expected, exact) = gradients(model, call), gradients(original, call)
    assert found.keys() == exact.keys()
    pair = [r[0] if isinstance(r, tuple) else r.loss for r in (result, expected)]
    least = max(float(gradient.norm()) for gradient in exact.values()) / 10
    errors = [
        float((found[name] - exact[name]).norm()) / max(float(exact[name].norm()), least)
        for name in exact
    ]
    return max([error(*(each.detach() for each in pair)), *errors])


@contextmanager
def sizes_made() -> Iterator[set[int]]:
    """Collect the numbers of elements of all results, within the loss's operators, too."""
    bodies = {
        getattr(torch.ops.vramx, name).default: function.implementation
        for name, function in (
            ("linear_cross_entropy", operators_loss.loss_and_gradients),
            ("linear_cross_entropy_losses", operators_loss.losses_of_tokens),
        )
    }

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in bodies:
                with self:
                    result = bodies[func](*args, **(kwargs or {}))
            else:
                result = func(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            sizes.update(x.numel() for x in tensors if x.device.type != "meta")
            return result

    sizes: set[int] = set()
    with Sizes():
        yield sizes
