"""Weights that are split over two processes, whose activations both of them hold, or parts of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_tools import SHARDS_ON_HOSTS, run_on_two
from torch import nn

import vramx

WIDTH = 64


class Block(nn.Module):
    """A norm that both processes have, and a feed-forward part that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def split(model: nn.Sequential) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        names = ("up", "down") if isinstance(block, Block) else ("linear1", "linear2")
        parallelize_module(block, mesh, {names[0]: ColwiseParallel(), names[1]: RowwiseParallel()})
    return model


def fused(model: nn.Sequential) -> None:
    vramx.optimize(model, "int8", min_bytes=256)


def packed(model: nn.Sequential) -> None:
    for block in model:
        vramx.compressed_activations(block, min_bytes=256)


def checkpointed(model: nn.Sequential) -> None:
    vramx.checkpoint_modules(model, where=Block, level=vramx.Compression(min_bytes=256))


WAYS: dict[str, Callable[[nn.Sequential], None]] = {
    "fused": fused,
    "packed": packed,
    "checkpointed": checkpointed,
}


def gradients(model: nn.Sequential) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model(torch.randn(4, 16, WIDTH)).square().sum().backward()
    found: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def sharded_within(original: nn.Sequential) -> tuple[list[Any], str]:
    """Return gradients beside the exact ones of blocks that are sharded by themselves under one
    checkpoint, and what is said of its input."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    one, two, three = copy.deepcopy(original)
    model = nn.Sequential(three, nn.Sequential(one, two))
    exact = gradients(copy.deepcopy(model))
    level = vramx.Compression(min_bytes=256)
    vramx.checkpoint_modules(model, where=lambda each: each is model[1], level=level)
    mesh = init_device_mesh("cpu", (2,))
    for block in (*model[1], model):
        fully_shard(block, mesh=mesh)
    found = gradients(model)
    return [(exact[name], found[name]) for name in exact], str(vramx.report(model))


def verified(original: nn.Module) -> tuple[list[str], bool]:
    """Return what is said of a layer that is to be compared and has a sharded part, and whether it
    has its gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = nn.Sequential(copy.deepcopy(original)), init_device_mesh("cpu", (2,))
    exact = gradients(copy.deepcopy(model))
    vramx.optimize(model, "int8", verify=True)
    for part in (model[0].linear1, model):
        fully_shard(part, mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(model)
    said = [str(each.message) for each in caught]
    return said, all(is_near(exact[name], found[name]) for name in exact)


def fully_sharded(original: nn.Sequential, around: bool) -> tuple[list[Any], str]:
    """Return gradients of FSDP1's parts, and what plan says of it; checkpoints may be around."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded

    part_of: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    blocks = [Sharded(copy.deepcopy(block), **part_of) for block in original]
    model = Sharded(nn.Sequential(*blocks), **part_of)
    if around:
        vramx.checkpoint_modules(model, where=lambda each: each in blocks, level="keep")
    torch.manual_seed(1)
    for _ in range(2):  # the second finds shards
        model.zero_grad()
        model(torch.randn(4, 16, WIDTH)).square().sum().backward()
    with pytest.raises(vramx.VramxError) as error:
        vramx.plan(model, torch.randn(4, 16, WIDTH))
    return [parameter.grad for parameter in model.parameters()], str(error.value)


def refused_of(model: nn.Module) -> dict[str, str]:
    """Return what is said of split weights where none are taken."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    x = torch.randn(4, 16, WIDTH)
    own = vramx.nn.Linear(WIDTH, WIDTH)
    parallelize_module(own, init_device_mesh("cpu", (2,)), ColwiseParallel())
    said = {}
    for name, call in {
        "predict": lambda: vramx.predict(lambda: model(x).sum().backward()),
        "vramx.nn": lambda: own(x),
    }.items():
        with pytest.raises(vramx.VramxError) as error:
            call()
        said[name] = str(error.value)
    return said


def run(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 128, 0.0, activation="gelu", batch_first=True, norm_first=True
    )
    original = nn.Sequential(Block(), layer, Block())
    result: dict[str, Any] = {"exact": gradients(copy.deepcopy(original))}
    for name, way in WAYS.items():
        model = copy.deepcopy(original)
        way(model)
        result[name] = gradients(split(model))
    model = split(copy.deepcopy(original))
    with vramx.compress(min_bytes=256) as stats:
        model(torch.randn(4, 16, WIDTH))
    result["refused"] = refused_of(model)
    result["FSDP1"] = [fully_sharded(original, around) for around in (False, True)]
    if SHARDS_ON_HOSTS:
        result["sharded within"] = sharded_within(original)
        result["verified"] = verified(layer)
    result["kept"] = {reason: tally.kept_bytes for reason, tally in stats.kept.items()}
    return result


def is_near(expected: torch.Tensor, gradient: torch.Tensor) -> bool:
    cosine = torch.cosine_similarity(expected.flatten(), gradient.flatten(), dim=0)
    return bool(cosine > 0.9993)


def linear_of(*tensors: tuple[torch.Tensor, Any], of: Callable[..., Any]) -> dict[str, Any]:
    """Run a function of distributed tensors, and of whole ones: the gradients, and what it kept."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = [each.clone().requires_grad_() for each, _ in tensors]
    of(*whole).sin().sum().backward()
    parts = [distribute_tensor(each, mesh, [where]).requires_grad_() for each, where in tensors]
    with vramx.compress(min_bytes=256) as stats:
        result = of(*parts).sin()
    result.full_tensor().sum().backward()
    found: list[Any] = [part.grad.full_tensor() for part in parts]
    pairs = list(zip([each.grad for each in whole], found, strict=True))
    kept = {reason: tally.kept_bytes for reason, tally in stats.kept.items()}
    return {"pairs": pairs, "packed": stats.packed.tensors, "kept": kept}


def run_by_hand(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard

    linear = nn.functional.linear
    torch.manual_seed(0)
    x, weight, down, up = (torch.randn(size) for size in ((16, 64), (32, 64), (8, 64), (32, 8)))
    scale = torch.logspace(-3, 3, 64)
    all_of, rows, columns = Replicate(), Shard(0), Shard(1)
    return {
        "whole": linear_of((x, all_of), (weight, rows), of=lambda x, w: linear(x * 2, w)),
        "columns": linear_of((x, columns), (weight, columns), of=lambda x, w: linear(x * 2, w)),
        "few rows": linear_of((x[:3], rows), (weight, all_of), of=lambda x, w: linear(x * 2, w)),
        "too few": linear_of(
            (x[:3, :40], rows), (weight[:, :40], all_of), of=lambda x, w: linear(x * 2, w)
        ),
        "merged": linear_of(
            *((x, all_of), (weight, rows), (down, all_of), (up, rows)),
            of=lambda x, w, down, up: linear(x * 2, w + up @ down),
        ),
        "partial": linear_of(
            *((x, columns), (weight, columns), (up, rows)),
            of=lambda x, w, up: linear(x @ w.T, up.T),
        ),
        "scaled": linear_of(
            *((x, all_of), (weight, all_of), (scale, all_of)),
            of=lambda x, w, scale: linear(x * scale, w / scale),
        ),
    }


# How many of what layers read is packed; each of two processes has a part, or all. What is less
# than min_bytes in one is packed in none: noise is counted by what is packed.
PACKED = {
    "whole": 1,
    "columns": 1,
    "few rows": 1,
    "too few": 0,
    "merged": 1,
    "partial": 0,
    "scaled": 0,
}


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two(run_by_hand, tmp_path_factory.mktemp("by_hand"))


@pytest.mark.parametrize("name", PACKED)
def test_what_a_process_has_of_a_layers_data_is_packed(
    name: str, by_hand: list[dict[str, Any]]
) -> None:
    for each in by_hand:
        found = each[name]
        assert found["packed"] == PACKED[name]
        assert all(is_near(*pair) for pair in found["pairs"])


def test_what_is_kept_counts_as_what_a_process_has(by_hand: list[dict[str, Any]]) -> None:
    # Half of the weight, which is a program's own tensor, and of the argument of the sine.
    for each in by_hand:
        assert each["whole"]["kept"] == {"subclass": (32 * 64 + 16 * 32) * 4 // 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two(run, tmp_path_factory.mktemp("tensor_parallel"))


@pytest.mark.parametrize("way", WAYS)
def test_what_both_processes_hold_has_one_gradient(way: str, results: list[dict[str, Any]]) -> None:
    first, second = (each[way] for each in results)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_whole_model(way: str, results: list[dict[str, Any]]) -> None:
    for each in results:
        for name, expected in each["exact"].items():
            assert is_near(expected, each[way][name])


def test_split_layers_keep_no_data_as_it_is(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert "subclass" not in each["kept"]
        assert each["kept"]["parameter"] > 0


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("predict", "predict before tensor parallelism"),
        ("vramx.nn", "split torch.nn's own modules"),
    ],
)
def test_what_takes_no_split_weights_says_what_to_do(
    what: str, text: str, results: list[dict[str, Any]]
) -> None:
    for each in results:
        assert text in each["refused"][what]


@pytest.mark.skipif(not SHARDS_ON_HOSTS, reason="this torch's FSDP2 does not average on hosts")
def test_a_checkpoint_packs_the_input_of_blocks_that_are_sharded_by_themselves(
    results: list[dict[str, Any]],
) -> None:
    for each in results:
        pairs, report = each["sharded within"]
        assert "saved" in report
        assert "kept:" not in report
        assert all(is_near(*pair) for pair in pairs)


@pytest.mark.skipif(not SHARDS_ON_HOSTS, reason="this torch's FSDP2 does not average on hosts")
def test_a_block_with_a_sharded_part_is_not_compared_within_a_step(
    results: list[dict[str, Any]],
) -> None:
    for each in results:
        said, is_right = each["verified"]
        assert is_right
        assert any("whose parts are sharded by themselves" in text for text in said)


def test_a_checkpoint_may_be_around_parts_of_fsdp1(results: list[dict[str, Any]]) -> None:
    for each in results:
        (expected, said), (found, _) = each["FSDP1"]
        pairs = [pair for pair in zip(expected, found, strict=True) if pair[0] is not None]
        assert pairs
        assert all(torch.equal(*pair) for pair in pairs)
        assert "fully_shard (FSDP2), or plan before" in said
