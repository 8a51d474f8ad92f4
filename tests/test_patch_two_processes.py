"""Ours in either order with DDP and FSDP2 on two processes: gradients, counts, and undoing.

Each trains with its own half of the batch: a gradient that was not averaged, or twice, shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_tools import SHARDS_ON_HOSTS, run_on_two
from interactions import FIRST, SPREAD_OURS, SPREAD_THEIRS, UNFUSED
from patch_tools import OURS, error, inputs, is_equal, model, pack
from torch import Tensor, nn

THEIRS = SPREAD_THEIRS if SHARDS_ON_HOSTS else ("DDP",)
CELLS = list(itertools.product(OURS, THEIRS, FIRST))
# Half a step of 126 to the largest of a group, which is four deviations, in each of eight tensors
# that a block saves; their errors are independent.
NEAR = 4 / 126 / 2 * (8 * 2) ** 0.5


def spread(net: nn.Sequential, theirs: str) -> nn.Module:
    if theirs == "DDP":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def gradients_of(outer: nn.Module, rank: int) -> list[Tensor]:
    outer.zero_grad()
    outer(inputs()[2 * rank : 2 * rank + 2]).square().mean().backward()
    found = [p.grad for p in outer.parameters() if p.grad is not None]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in found]


def cell(rank: int, ours: Callable[[Any], None], theirs: str, first: str) -> dict[str, Any]:
    import vramx

    exact = gradients_of(spread(model(), theirs), rank)
    net = model()
    if first == "ours":
        ours(net)
    outer = spread(net, theirs)
    if first == "theirs":
        ours(net)
    found = gradients_of(outer, rank)
    counts = [vramx.compression_stats(outer).kept["parameter"].tensors] if ours is pack else []
    changed = len(vramx.report(outer).rows)
    undone = len(vramx.restore(outer))
    after = gradients_of(outer, rank)
    return {
        "found": found, "exact": exact, "after": after, "changed": changed, "undone": undone,
        "by_reference": counts,
    }  # fmt: skip


def _run(rank: int) -> dict[str, Any]:
    cells = [each for each in CELLS if each != UNFUSED]
    return {str(each): cell(rank, OURS[each[0]], *each[1:]) for each in cells}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    return run_on_two(_run, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def whole() -> list[Tensor]:
    """Return the gradients of the whole batch on one process."""
    net = model()
    net(inputs()).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_the_page_has_these_cells() -> None:
    assert tuple(OURS) == SPREAD_OURS


@pytest.mark.parametrize("each", [each for each in CELLS if each != UNFUSED], ids="-".join)
def test_cell_works_and_is_undone(each: Any, results: Any, whole: list[Tensor]) -> None:
    one, other = (result[str(each)] for result in results)
    assert is_equal(one["found"], other["found"])
    assert one["by_reference"] == ([9] if each[0] == "packed" else [])  # as without them
    assert one["changed"] == one["undone"] == (1 if each[0] == "fused" else 2)
    assert error(one["exact"], whole) < 1e-5  # sums in another order
    assert 0 < error(one["found"], one["exact"]) < NEAR
    assert is_equal(one["after"], one["exact"])
