"""A loss without logits under DistributedDataParallel and sharding, on two processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from distributed_tools import SHARDS_ON_HOSTS, run_on_two
from language_model_tools import call_of, gradients, language_model
from optimize_tools import ROUNDING, error
from torch import nn

import vramx
from vramx.errors import LogitsNotMadeError

REPLICAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two(_run, tmp_path_factory.mktemp("distributed"))


def _run(rank: int) -> dict[str, Any]:
    original = language_model()
    call = call_of()
    expected = {name: value.clone() for name, value in gradients(original, call)[1].items()}
    # Each has as many tokens that count: the mean of their means is the mean.
    own = {name: value.roll(rank, 0) for name, value in call.items()}
    result: dict[str, Any] = {}
    for name, options in REPLICAS.items():
        model = copy.deepcopy(original)
        vramx.optimize(model, "keep")
        replica = nn.parallel.DistributedDataParallel(model, **options)
        for _ in range(2):
            found, of = gradients(replica, own)
        errors = [error(of[f"module.{name}"], expected[name]) for name in expected]
        result[name] = (max(errors), found.logits.is_made, found.logits.argmax(-1).shape)
    if SHARDS_ON_HOSTS:
        result["sharded"] = _run_sharded(copy.deepcopy(original), own, expected)
    return result


def _run_sharded(model: Any, own: dict[str, Any], expected: dict[str, Any]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    vramx.optimize(model, "keep")
    for part in (*model.layers, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    found, _ = gradients(model, own)
    of: dict[str, Any] = {name: value.grad for name, value in model.named_parameters()}
    worst = max(error(of[name].full_tensor(), expected[name]) for name in expected)
    is_made = found.logits.is_made
    try:
        found.logits.argmax(-1)
    except LogitsNotMadeError as raised:
        return worst, is_made, str(raised)
    return worst, is_made, ""


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_have_the_originals_gradient(name: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        worst, is_made, shape = result[name]
        assert worst < ROUNDING
        assert (is_made, shape) == (False, (2, 24))


@pytest.mark.skipif(not SHARDS_ON_HOSTS, reason="this torch's FSDP2 does not average on hosts")
def test_shards_have_the_originals_gradient(results: list[dict[str, Any]]) -> None:
    for result in results:
        worst, is_made, text = result["sharded"]
        assert worst < ROUNDING
        assert not is_made
        assert "sharded again" in text
