"""A process of tests/test_nn_interpreted_model.py: a model's step with interpreted kernels.

Triton interprets what is imported after TRITON_INTERPRET is set, so this is a process of its own.
Prints one line of JSON: by name, how far the gradients of a swapped encoder layer are from those of
the untouched one, as a share of their norm.
"""

from __future__ import annotations

import copy
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from quick_interpreter import quicken
from torch import Tensor, nn

import vramx
from vramx.kernels import launch

BATCH, TOKENS, HIDDEN = 2, 5, 64


def gradients(model: nn.Module, x: Tensor, of_output: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    model(x).backward(of_output)
    assert x.grad is not None
    found = {"input": x.grad}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
    return found


def errors(norm_first: bool) -> dict[str, float]:
    torch.manual_seed(0)
    original = nn.TransformerEncoderLayer(
        HIDDEN, 4, 2 * HIDDEN, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    swapped = copy.deepcopy(original)
    assert vramx.optimize(swapped, "keep").swapped
    x, of_output = torch.randn(2, BATCH, TOKENS, HIDDEN)
    right, found = (gradients(model, x, of_output) for model in (original, swapped))
    return {
        name: float((found[name] - gradient).norm() / gradient.norm())
        for name, gradient in right.items()
    }


if __name__ == "__main__":
    quicken()
    assert launch.supported(torch.device("cpu"))
    json.dump({"pre": errors(True), "post": errors(False)}, sys.stdout)
