"""Blocks that no family names: what is read of them and what is not; both compute the same."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from norm_tools import INT8_STEP, held_bytes
from optimize_tools import ROUNDING
from plain_tools import (
    CHOICES,
    OF_PARTS,
    STRANGE,
    TOKENS,
    WIDTH,
    Block,
    DropPath,
    batch,
    far,
    fused_blocks,
    made,
    model_of,
    results,
)
from torch import Tensor, nn
from torch.fx import _symbolic_trace
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from benchmarks.programs._adapters import Adapters, adapt
from vramx.nn.families import plain_following, plain_record

# As INT8_NOISE of optimize_tools.py, of one pack in each of two blocks.
ONE_PACK = INT8_STEP * 4 / 2 * 2**0.5

# Each option but the first by itself, and pairs of them.
ONE = [{name: value} for name, values in CHOICES.items() for value in values[1:]]
PAIRS = [
    {**a, **b}
    for a, b in random.Random(0).sample(
        [pair for pair in itertools.combinations(ONE, 2) if not pair[0].keys() & pair[1].keys()], 24
    )
]


def _is_possible(options: dict[str, Any]) -> bool:
    how = made(**options)
    return not (how.grouped and not how.torchs)


@pytest.mark.parametrize("options", [{}, *filter(_is_possible, ONE + PAIRS)], ids=str)
def test_a_plain_block_computes_the_same_at_every_level(options: dict[str, Any]) -> None:
    how = made(**{**options, "dropout": 0.0, "attention_dropout": 0.0})
    model, x = model_of(how), batch()
    expected = results(model, x)
    for level in ("keep", "recompute_all"):
        report = vramx.optimize(model, level, rounding="nearest")
        assert fused_blocks(report) == 2
        bound = ROUNDING if level == "keep" else ONE_PACK
        assert far(results(model, x), expected) < bound
    vramx.restore(model)
    assert far(results(model, x), expected) == 0


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS + 8])
def test_what_is_not_known_is_named_and_computed_as_it_was(strange: str, tokens: int) -> None:
    value = 4 if strange == "window" else True
    options = {strange: value, "torchs": strange not in OF_PARTS}
    model, x = model_of(made(**options)), batch(tokens)
    # What autocast is switched in shows where it is on.
    with torch.autocast("cpu", torch.bfloat16, enabled=strange == "in_float"):
        _is_named(model, x, strange)


def _is_named(model: nn.Module, x: Tensor, strange: str) -> None:
    expected = results(model, x)
    attributes = [dict(vars(part)) for part in model.modules() if not hasattr(part, "last")]
    report = vramx.optimize(model, "keep")
    assert fused_blocks(report) == 0
    reasons = [row.reason for row in report.left if row.module == "Block"]
    assert len(reasons) == 2
    assert all(STRANGE[strange] in reason for reason in reasons)
    assert far(results(model, x), expected) == 0
    if strange != "seen":
        assert [dict(vars(part)) for part in model.modules()] == attributes


def test_a_window_in_a_mask_of_its_own_is_seen() -> None:
    for torchs in (True, False):
        model = model_of(made(window=4, torchs=torchs))
        assert fused_blocks(vramx.optimize(model)) == 0


def test_reading_leaves_a_module_as_it_was() -> None:
    """One that keeps its last result is not given one by a trace, and trains or not as before."""
    model = model_of(made(seen=True)).eval()
    random.seed(0)
    drawing = model_of(made(skips=True, skips_as_torch=True))
    before, torchs = random.getstate(), torch.get_rng_state()
    for each in (model, drawing):
        vramx.optimize(each)
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), torchs)
    assert not any(hasattr(part, "last") for part in model.modules())
    assert not any(part.training for part in model.modules())


def test_modules_of_other_threads_run_while_a_block_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, modes = nn.Sequential(nn.Linear(4, 4)), plain_record._modes
    with ThreadPoolExecutor(1) as pool:

        def look() -> Any:  # for each operation of a trace
            assert isinstance(pool.submit(other, torch.ones(4)).result(), Tensor)
            return modes()

        monkeypatch.setattr(plain_record, "_modes", look)
        assert fused_blocks(vramx.optimize(model_of(made()), "keep")) == 2


def test_an_interrupt_while_torch_undoes_what_it_traced_by_leaves_modules_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    call, find, others = nn.Module.__call__, nn.Module.__getattr__, dict(vars(math))
    monkeypatch.setattr(_symbolic_trace._Patcher, "revert_all_patches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        vramx.optimize(model_of(made()), "keep")
    assert (nn.Module.__call__, nn.Module.__getattr__, vars(math)) == (call, find, others)
    monkeypatch.undo()
    assert fused_blocks(vramx.optimize(model_of(made()), "keep")) == 2


def test_int8_keeps_less_with_the_gradients() -> None:
    model, x = model_of(made(torchs=False, causal=False)), batch(256)
    expected, whole = results(model, x), held_bytes(lambda: model(x))
    vramx.optimize(model, "int8", min_bytes=0)
    found = results(model, x)
    assert far(found[:1], expected[:1]) < ROUNDING
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999
    assert held_bytes(lambda: model(x)) < whole / 4


def test_dropout_is_that_of_the_block() -> None:
    """As many elements as the probability says are dropped, and none in evaluation."""
    how = made(dropout=0.5, norm="torchs")
    block = Block(how).train()
    with torch.no_grad():
        block.attn.proj.weight.zero_()
        block.attn.proj.bias.fill_(1.0)
        block.mlp[2].weight.zero_()
        block.mlp[2].bias.zero_()
    model = nn.Sequential(block)
    assert fused_blocks(vramx.optimize(model, "keep")) == 1
    x = torch.zeros(4, 512, WIDTH, requires_grad=True)
    y = model(x)
    assert set(y.detach().unique().tolist()) == {0.0, 2.0}
    assert abs(float((y == 0).float().mean()) - 0.5) < 0.01
    assert torch.equal(model.eval()(x), torch.ones_like(x))


def _tell_causal(block: Any) -> None:
    block.attn.how.causal = block.how.causal = True


def _forward_thrice(block: Any) -> None:
    block.attn.forward = lambda x: 3 * x


def _assign(path: str, value: Any) -> Callable[[Any], None]:
    """Return what gives a part of a block another attribute."""
    where, _, name = path.rpartition(".")
    return lambda block: setattr(block.get_submodule(where), name, value)


# What may happen to a block after it was read, by whether its attention has a table.
_CHANGES: dict[str, tuple[bool, Callable[[Any], object]]] = {
    "constant": (False, _assign("attn.factor", 0.7)),
    "list": (False, lambda block: block.attn.factors.__setitem__(0, 0.5)),
    "config": (False, _tell_causal),
    "hook": (False, lambda block: block.mlp.register_forward_hook(lambda *args: 2 * args[2])),
    "forward": (False, _forward_thrice),
    "identity": (False, _assign("path", DropPath())),
    "evaluated": (False, lambda block: block.attn.eval()),
    "written table": (True, lambda block: block.attn.tril.triu_(-3)),
    "other table": (True, _assign("attn.tril", torch.ones(1, 1, 64, 64).tril().triu(-3))),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_what_changes_after_it_was_read_is_computed_as_it_is(change: str) -> None:
    has_table, make = _CHANGES[change]
    model, x = model_of(made(torchs=False, causal=has_table)), batch()
    assert fused_blocks(vramx.optimize(model, "keep")) == 2
    before = results(model, x)
    twin = copy.deepcopy(model)
    vramx.restore(twin)
    for each in (model, twin):
        make(each[0])
    found = results(model, x)
    assert far(found, results(twin, x)) < ROUNDING  # the other block is fused
    assert change == "evaluated" or far(found[:1], before[:1]) > 0.01


def test_an_argument_that_was_not_read_is_given() -> None:
    model, x = model_of(made()), batch()
    vramx.optimize(model, "keep")
    expected, block = results(model, x), model[0]
    mask = torch.full((1,), 3.0)
    found = block(x, mask)
    vramx.restore(model)
    assert torch.equal(found, block(x, mask))
    assert far(results(model, x), expected) < ROUNDING


def test_parts_are_found_where_they_are() -> None:
    """Another Linear, norm or activation in a part's place is the one that is computed with."""
    model, x = model_of(made()), batch()
    vramx.optimize(model, "keep")
    twin = copy.deepcopy(model)
    vramx.restore(twin)
    for each in (model, twin):
        torch.manual_seed(3)
        block: Any = each[0]
        block.attn.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        block.mlp[1] = nn.Tanh()
        block.mlp[2] = nn.Sequential(nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
    assert far(results(model, x), results(twin, x)) < ROUNDING


def test_copies_pickles_and_states_are_the_blocks() -> None:
    model, x = model_of(made()), batch()
    names = list(model.state_dict())
    expected = results(model, x)
    vramx.optimize(model, "keep")
    assert list(model.state_dict()) == names
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert far(results(copied, x), expected) < ROUNDING
        assert "PlainBlock" in str(vramx.report(copied))
        vramx.restore(copied)
        assert far(results(copied, x), expected) == 0


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp", "recompute_all"])
def test_dropout_between_the_linears_is_called_where_it_is(level: str) -> None:
    """Then the feed-forward part is computed as it is written."""
    how = made(dropout=0.5, inner_dropout=True)
    block = Block(how).train()
    with torch.no_grad():
        for linear in (block.mlp[0], block.mlp[3]):
            linear.weight.copy_(torch.eye(*linear.weight.shape))
            linear.bias.zero_()
        block.attn.proj.weight.zero_()
        block.attn.proj.bias.zero_()
    block.how.dropout = 0.0  # of the function behind it
    model = nn.Sequential(block)
    assert fused_blocks(vramx.optimize(model, level)) == 1
    x = torch.randn(2, 256, WIDTH, generator=torch.Generator().manual_seed(0))
    y = model(x.requires_grad_()) - x
    assert abs(float((y == 0).float().mean()) - 0.5) < 0.02


def test_verify_agrees() -> None:
    model, x = model_of(made(torchs=False)), batch()
    vramx.optimize(model, "keep", verify=True)
    results(model, x)
    assert "PlainBlock" in str(vramx.report(model))


@pytest.mark.parametrize("torchs", [True, False])
def test_a_prediction_reads_blocks_too(torchs: bool) -> None:
    """Also the mask of one, though its tensors have no data then."""
    model, x = model_of(made(torchs=torchs)), batch(64)
    found = vramx.predict(model, x, levels=["recompute_all"]).row()
    vramx.optimize(model, "recompute_all")
    assert found.peak_bytes["live"] == vramx.predict(model, x).row().peak_bytes["live"]


@pytest.mark.parametrize("activation", ["relu", "step", "gelu"])
def test_what_may_compare_is_recomputed_from_what_it_had(activation: str) -> None:
    """A slope that jumps is the original's: there the input is kept exactly."""
    model, x = model_of(made(activation=activation)), batch(512)
    expected = results(model, x)
    vramx.optimize(model, "recompute_all", min_bytes=0)
    found = results(model, x)
    assert (far(found, expected) < ROUNDING) == (activation != "gelu")


def test_levels_by_name_and_what_is_left() -> None:
    model = model_of(made())
    report = vramx.optimize(model, {"0": "recompute_mlp", "1": "left"})
    assert [(row.name, row.done) for row in report.swapped] == [("0", "recompute_mlp")]


def test_a_known_family_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_following, "follow", None)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert len(vramx.optimize(nn.Sequential(layer)).swapped) == 1


@pytest.mark.slow
def test_a_compiled_graph_sees_what_changes() -> None:
    model, x = model_of(made(torchs=False)), batch()
    expected = results(model, x)
    vramx.optimize(model, "keep")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert far(results(compiled, x), expected) < ROUNDING
    block: Any = model[0]
    block.attn.factor = 0.7
    found = results(compiled, x)
    assert far(found, expected) > 0.01
    vramx.restore(model)
    assert far(found, results(model, x)) < ROUNDING


@pytest.mark.parametrize("torchs", [True, False])
def test_what_is_traced_or_has_no_data_is_the_original(torchs: bool) -> None:
    """A trace asks for what the original is made of; of tensors without data nothing is kept."""
    model, x = model_of(made(torchs=torchs)), batch()
    expected = results(model, x)
    vramx.optimize(model, "keep")
    traced = torch.jit.trace(model, (x,), check_trace=False)
    assert far(results(traced, x), expected) < ROUNDING
    assert model.to("meta")(x.to("meta")).shape == expected[0].shape


@pytest.mark.parametrize("norm", ["own", "torchs", "hand"])
def test_under_autocast(norm: str) -> None:
    """The residual stream has the weights' type, as in the original."""
    model, x = model_of(made(norm=norm)), batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(model, x)
        for level, least in (("keep", 0.999), ("int8", 0.998)):
            assert fused_blocks(vramx.optimize(model, level, min_bytes=0)) == 2
            found = results(model, x)
            assert [each.dtype for each in found] == [each.dtype for each in expected]
            for a, b in zip(found, expected, strict=True):
                assert F.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0) > least


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp"])
def test_adapters_are_part_of_the_block(level: str) -> None:
    model, x = model_of(made(torchs=False)), batch()
    adapt(model, Adapters(("qkv", "proj"), rank=4, dropout=0.0), torch.float32)
    expected = results(model, x)
    report = vramx.optimize(model, level, min_bytes=0, rounding="nearest")
    assert fused_blocks(report) == 2
    found = results(model, x)
    assert far(found[:1], expected[:1]) < ROUNDING
    for a, b in zip(found, expected, strict=True):
        assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999


def test_a_record_that_failed_leaves_nothing_behind() -> None:
    """The collector may come by late: torch's hooks, and what stood for tensors, until then."""
    gc.collect()
    gc.disable()
    try:
        model = model_of(made(checkpointed=True))
        assert fused_blocks(vramx.optimize(model, "keep")) == 0
        results(model, batch())  # with no hooks but its own
        assert [each for each in gc.get_objects() if isinstance(each, Tensor)]
    finally:
        gc.enable()
