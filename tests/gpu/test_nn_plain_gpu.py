"""Blocks that no family names on a GPU, in float32 under autocast, as plain programs train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from norm_tools import held_bytes
from plain_tools import batch, fused_blocks, made, model_of, results
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx

pytestmark = pytest.mark.gpu

OPTIONS = (
    {"norm": "own", "torchs": True},
    {"norm": "torchs", "torchs": False, "in_place": True},
    {"norm": "hand", "torchs": False, "causal": False, "activation": "swish"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp", "recompute_all"])
def test_a_step_has_the_gradients(options: dict[str, Any], level: str) -> None:
    model, x = model_of(made(**options)).cuda(), batch(48).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        expected, whole = results(model, x), held_bytes(lambda: model(x))
        assert fused_blocks(vramx.optimize(model, level, min_bytes=0)) == 2
        found, held = results(model, x), held_bytes(lambda: model(x))
    for a, b in zip(found, expected, strict=True):
        assert F.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0) > 0.998
    assert level == "keep" or held < whole


@pytest.mark.parametrize("torchs", [True, False])
def test_a_step_compiles_whole(torchs: bool) -> None:
    model, x = model_of(made(torchs=torchs)).cuda(), batch(48).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        expected = results(model, x)
        vramx.optimize(model, "int8", min_bytes=0)
        found = results(torch.compile(model, fullgraph=True), x)
    for a, b in zip(found, expected, strict=True):
        assert F.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0) > 0.998
