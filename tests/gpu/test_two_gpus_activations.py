"""Models that keep less, replicated and sharded over two GPUs: gradients as the untouched one's."""

from __future__ import annotations

import pytest
from optimize_tools import INT8_NOISE

from gpu import runner
from gpu.runner import Outcome

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

# Sums of float32 in another order, over ranks and in other kernels.
ROUNDING = 1e-4
EXACT = ("exact", "keep")
WAYS = (
    *(f"llama {way}" for way in (*EXACT, "compress", "checkpoint", "recompute_mlp")),
    *(f"{name} {way}" for name in ("llama", "gpt2", "vit") for way in ("int8", "recompute_all")),
    *("gpt2 exact", "vit exact"),
)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    pytest.importorskip("transformers")
    return runner.on_two_gpus("two_gpu_activations")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_untouched_model(outcome: Outcome, way: str, kind: str) -> None:
    name, way = way.split()
    facts = outcome.facts()["ways"][f"{name} {kind} {way}"]
    assert facts["error"] < (ROUNDING if way in EXACT else INT8_NOISE)
    assert (facts["changed"] > 0) == (way != "exact")


def test_ranks_have_the_same_gradients(outcome: Outcome) -> None:
    assert outcome.facts()["same"]
