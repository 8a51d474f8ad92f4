"""vramx.plan on models of transformers, as the installed release makes and calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimize_tools import INT8_NOISE, LAYERS, decoder, error, hugging_face

import vramx
from vramx.errors import InvalidValueError
from vramx.nn.logits import Logits

transformers = pytest.importorskip("transformers")


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def gradient(model: Any) -> torch.Tensor:
    model.zero_grad()
    model(**batch()).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_plan_of_a_model_trains_as_the_model(name: str) -> None:
    model: Any = hugging_face(transformers, name)[0]
    for part in model.modules():  # a mask of their own each time: no gradients to compare
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.config.use_cache = False
    exact = gradient(model)
    plan = vramx.plan(model, batch(), budget="smallest", levels=["recompute_all"]).apply()
    assert list(plan.words.values()) == ["recompute_all"] * LAYERS
    assert isinstance(model(**batch()).logits, Logits)  # its loss makes none
    assert error(gradient(model), exact) < INT8_NOISE
    plan.undo()
    assert torch.equal(gradient(model), exact)


def test_plan_of_a_model_that_makes_a_cache_says_so() -> None:
    model = decoder(transformers)
    with pytest.raises(InvalidValueError, match="a cache that training has no use for"):
        vramx.plan(model, batch(), levels=["int8"])
