"""The benchmark of swapped blocks: its ways, what it measures, its goals, rows and picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from program_stand_ins import ended_with, line, rows
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks import fused
from benchmarks.harness import RowWriter
from benchmarks.models_workloads import Batch, Workload
from benchmarks.programs import _cases, _fused, _fused_ways
from benchmarks.programs._fused import Arena, Case
from benchmarks.programs._fused_ways import SkippedError, Subject

CONTEXTS = _fused_ways.selective_contexts
WIDTH, TOKENS, LAYERS = 16, 6, 2


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PROGRAM_SIZE", "tiny")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small take longer to hand out than to multiply
    yield
    torch.set_num_threads(threads)


class Body(nn.Module):
    """Encoder layers of torch."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Stack(nn.Module):
    """A body, which is what is measured, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, 2)


def forward(model: Any, batch: Batch) -> Tensor:
    result: Tensor = model(batch.inputs)
    return result


def build() -> Workload:
    model = Stack()

    def draw(generator: torch.Generator, is_large: bool) -> Batch:
        inputs = torch.randn(2, TOKENS, WIDTH, generator=generator).requires_grad_()
        return Batch(inputs, torch.zeros(2))

    return Workload(
        model,
        (nn.TransformerEncoderLayer,),
        draw,
        lambda batch: forward(model.body, batch),
        lambda result, batch: result.sum(),
        is_autocast=False,
        blocks=tuple(model.body.layers),
        elements=2 * TOKENS * WIDTH * LAYERS,
    )


PLAIN = ("eager", "int8", "int4", "checkpoint", "selective_checkpoint")
CASE = Case(build, "body", forward, PLAIN)


def make_arena() -> Arena:
    return Arena(CASE, torch.device("cpu"))


def saved_bytes(arena: Arena, subject: Subject) -> int:
    """Return the bytes of distinct storages that a forward pass saves, but for parameters."""
    ours = {parameter.untyped_storage()._cdata for parameter in arena.parameters}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        subject.run(arena.batch)
    return sum(t.untyped_storage().nbytes() for key, t in seen.items() if key not in ours)


def test_every_way_has_the_same_weights_and_adds_to_the_same_gradients() -> None:
    arena = make_arena()
    first, second = arena.subject(), arena.subject()
    assert first.model is not second.model
    expected = arena.gradients(first)
    assert all(torch.equal(a, b) for a, b in zip(expected, arena.gradients(second), strict=True))
    assert any(bool(gradient.any()) for gradient in expected)
    assert len(list(first.model.parameters())) == len(arena.parameters)  # and not the head's


def test_ways_compare_gradients_without_dropout_and_keep_it_otherwise() -> None:
    arena = make_arena()
    subject = arena.subject()
    dropouts = [m for m in subject.model.modules() if isinstance(m, torch.nn.Dropout)]
    before = [m.p for m in dropouts]
    assert any(before)
    with _fused.without_dropout(subject.model):
        assert not any(m.p for m in dropouts)
    assert [m.p for m in dropouts] == before


def test_the_gradient_that_backward_is_given_may_be_written_over() -> None:
    class Rude(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            return dy.zero_()

    arena = make_arena()
    rude = replace(arena.subject(), forward=lambda m, batch: Rude.apply(forward(m, batch)))
    assert not any(bool(gradient.any()) for gradient in arena.gradients(rude))
    assert any(bool(gradient.any()) for gradient in arena.gradients(arena.subject()))


def test_fewer_blocks_run_and_all_are_back_afterwards() -> None:
    arena = make_arena()
    subject = arena.subject()
    full = saved_bytes(arena, subject)
    with arena.fewer_blocks(subject) as fewer:
        assert fewer == 1
        # They save alike, and nothing else does.
        assert saved_bytes(arena, subject) * LAYERS == full
    assert saved_bytes(arena, subject) == full


def test_our_ways_and_checkpoints_keep_less_than_eager() -> None:
    arena = make_arena()
    kept = {
        way: saved_bytes(arena, _fused_ways.WAYS[way](arena.subject()))
        for way in ("eager", "keep", "int8", "checkpoint")
    }
    assert kept["eager"] > kept["keep"] > kept["int8"] > kept["checkpoint"]


def test_a_block_that_is_not_swapped_skips_the_way() -> None:
    arena = make_arena()
    subject = arena.subject()
    subject.blocks[1].norm_first = object()  # type: ignore[assignment]
    subject.blocks[1].forward = subject.blocks[1].forward  # type: ignore[method-assign]
    with pytest.raises(SkippedError, match="1 is not swapped: its forward was replaced"):
        _fused_ways.WAYS["int8"](subject)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("options", "again"), [({}, 5), ({"context_fn": CONTEXTS}, 2)])
def test_selective_checkpoints_recompute_every_second_product(
    options: dict[str, Any], again: int
) -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)

    def block(x: Tensor) -> Tensor:
        for _ in range(5):
            x = (x @ w).sin()  # which saves the product
        return x

    with Products() as products:
        checkpoint(block, x, use_reentrant=False, **options).sum().backward()
    assert products.count == 5 + 5 + again  # forward, backward, recomputed


@pytest.mark.slow
def test_a_budget_keeps_less_than_the_same_model_compiled_without() -> None:
    arena = make_arena()
    free, bound = (_fused_ways.compiled(arena.subject(), budget) for budget in (None, 0.3))
    assert saved_bytes(arena, free) > saved_bytes(arena, bound)


def test_liger_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(SkippedError, match="cannot be imported"):
        _fused_ways.liger(make_arena().subject())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SkippedError, match="need a GPU"):
        _fused_ways.liger(make_arena().subject())


def test_what_liger_replaces_is_in_place_in_its_own_steps_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = SimpleNamespace(turn="torch's", norm="torch's")
    apply = vars(source).update
    module = SimpleNamespace(apply_liger_kernel_to_llama=lambda **_: apply(turn="Liger's"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    monkeypatch.setitem(sys.modules, "transformers.models.llama.modeling_llama", source)
    arena = make_arena()
    subject = arena.subject()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []
    ready = _fused_ways.liger(
        replace(subject, forward=lambda m, b: seen.append(source.turn) or forward(m, b))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert source.turn == "torch's"
    arena.step(ready)
    assert (seen, source.turn, source.norm) == (["Liger's"], "torch's", "torch's")


def test_a_case_reports_every_way_and_a_failure_stops_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(subject: Subject) -> Subject:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setitem(_fused.CASES, "llama", replace(CASE, ways=(*PLAIN[:3], "broken", "eager2")))
    monkeypatch.setitem(_fused_ways.WAYS, "broken", broken)
    monkeypatch.setitem(_fused_ways.WAYS, "eager2", _fused_ways.eager)
    arena = make_arena()
    _fused.compare_times("llama", arena, _fused.prepare("llama", arena))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(line["case"], line.get("metric")): line for line in lines}
    assert found["llama broken", None]["status"] == "failed: RuntimeError: no such"
    assert found["llama eager2", "gradient_cosine"]["values"] == [pytest.approx(1.0, abs=1e-6)]
    exactness = [found[f"llama {way}", "gradient_cosine"]["values"][0] for way in PLAIN[:3]]
    assert exactness == sorted(exactness, reverse=True)
    assert exactness[2] < 0.9999  # it was packed in four bits
    assert {case for case, metric in found if metric == "step_ms"} == {
        f"llama {way}" for way in (*PLAIN[:3], "eager2")
    }


GOOD = (
    line("llama eager", "step_ms", 200.0, 201.0, 199.0),
    line("llama int8", "step_ms", 174.0, 400.0, 174.0),
    line("llama int8", fused.BLOCK, 12.2),
)


def test_skipped_ways_are_rows_and_no_failures_and_failed_ones_are(
    writer: RowWriter, tmp_path: Path
) -> None:
    skipped = {"case": "llama liger", "status": "skipped: Liger's kernels need a GPU"}
    failed = {"case": "vit int4", "status": "failed: RuntimeError: no"}
    process = ended_with(*GOOD, skipped)
    figures, has_failed = _cases.measure(["llama"], lambda _: process, writer)
    assert not has_failed
    assert _cases.measure(["vit"], lambda _: ended_with(failed), writer) == ({}, True)
    fused.write_ratios(fused.judge(figures), writer)
    written = {(row["case"], row["metric"]): row for row in rows(tmp_path)}
    assert written["llama liger", ""]["status"] == skipped["status"]
    assert written["llama int8 against eager", "step_ratio"]["samples"] == "0.87 1.99005 0.874372"
    assert fused.table(figures, fused.judge(figures)).row_count == 2


def test_the_figures_become_a_picture(writer: RowWriter, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    writer._maker._shared["benchmark"] = "fused"
    _cases.measure(["llama"], lambda _: ended_with(*GOOD), writer)
    assert plot.main([str(tmp_path / "rows.csv")]) == 0
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
