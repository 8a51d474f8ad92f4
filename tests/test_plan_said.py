"""What a plan says: its levels and why, the peak before and after, and the code to write."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
import torch
from plan_tools import (
    LEVELS,
    PACKED_ROWS,
    Block,
    Stack,
    counted_time,
    peak_bytes,
    rows,
    without_noise,
)
from torch import Tensor, nn

import vramx
from vramx.errors import InvalidValueError
from vramx.planning.plan_text import _list_of
from vramx.progress import ProgressBar

__all__ = ["counted_time", "without_noise"]
pytestmark = pytest.mark.usefixtures("seeded", "counted_time")


class Deep(Block):
    """A block that is recomputed in more memory than its packed activations take."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(4):  # no list of blocks, which would be the blocks themselves
            self.add_module(f"more{number}", Block())

    def forward(self, x: Tensor, past_key_values: object = None) -> Tensor:
        x = super().forward(x)
        for number in range(4):
            x = self.get_submodule(f"more{number}")(x)
        return x


def test_the_noisiest_level_is_taken_where_nothing_else_fits(without_noise: None) -> None:
    sample = rows(PACKED_ROWS)
    plan = vramx.plan(Stack(2, Deep), sample, "smallest")
    assert "int4" not in plan.words.values()
    assert "int4" not in str(plan)
    forced = plan.with_budget(sample, plan.measured_bytes - 1)
    assert "int4" in forced.words.values()
    assert forced.measured_bytes < plan.measured_bytes
    assert re.search(r"int4 is for \d blocks, as nothing else fits the budget", str(forced))
    assert "int4" not in plan.with_budget(sample, plan.measured_bytes).words.values()


def test_the_noisiest_level_is_taken_where_it_is_allowed() -> None:
    model = Stack(2)
    plan = vramx.plan(model, rows(PACKED_ROWS), levels=("int4",))
    assert set(plan.words.values()) == {"int4"}
    assert "int4 is for 2 blocks, as levels allow it; its gradients are the noisiest" in str(plan)
    without = vramx.plan(model, rows(64), "smallest", levels=("left", "int8"))
    with pytest.raises(InvalidValueError, match="smallest budget"):
        without.with_budget(rows(64), without.measured_bytes - 1)


def test_the_peak_and_the_step_before_are_said() -> None:
    model, sample = Stack(2), rows(PACKED_ROWS)
    plan = vramx.plan(model, sample, "smallest", levels=LEVELS)
    assert plan.before_bytes == peak_bytes(model, sample)
    assert plan.measured_bytes < plan.before_bytes
    assert re.search(r"measured; before \d+\.\d+ MiB; budget", str(plan))
    assert re.search(r"step .* measured; before \d+\.\d$", str(plan), re.MULTILINE)


def test_the_text_has_a_line_for_each_block_and_both_peaks_as_a_notebook_has() -> None:
    plan = vramx.plan(Stack(2), lambda model: model(rows(512)).mean(), "1GiB", levels=("left",))
    lines = str(plan).splitlines()
    assert lines[0].split() == ["block", "class", "word", "kept", "host", "ms", "device", "ms"]
    for i, (line, row) in enumerate(zip(lines[1:3], plan.rows, strict=True)):
        assert line.split()[:3] == [f"blocks.{i}", "Block", "left"]
        assert row.host_ms > row.device_ms == 0.0
        assert line.split()[-2:] == [f"{row.host_ms:.2f}", "0.00"]
    assert "predicted" in lines[3]
    assert "budget 1.00 GiB" in lines[3]
    assert "no optimizer was given" in str(plan)
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + len(plan.rows)
    assert unescape(re.sub(r"<[^>]+>", " ", html)).split() == str(plan).split()


class Other(nn.Module):
    """A block that vramx.optimize does not know, around what could be decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def known_and_not() -> nn.Module:
    known = (nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(4))
    return nn.Sequential(*known, Other(), Other())


@pytest.mark.parametrize(
    ("make", "levels"),
    [
        *((Stack, levels) for levels in (("int8", "left"), ("recompute_all",), ("left",))),
        *((known_and_not, levels) for levels in (("int8", "left"), ("recompute_all",))),
        *((known_and_not, levels) for levels in (("recompute_mlp", "int8"), ("keep", "left"))),
    ],
)
def test_the_code_that_is_printed_does_what_apply_does(make: Any, levels: Any) -> None:
    model, sample = make(), rows(64) if make is Stack else torch.randn(2, 16, 32)
    plan = vramx.plan(model, sample, "smallest", levels=levels)
    applied = str(vramx.report(plan.apply()._chooser.model))
    printed = plan.code
    plan.undo()
    assert plan.code == printed
    assert str(vramx.report(model)) != applied or set(plan.words.values()) == {"left"}
    text = str(plan)
    code = [line[4:] for line in text[text.index("to write:") :].splitlines()[1:]]
    assert code[0] == "plan.apply()  # or:"
    exec("\n".join(code[1:]), {"vramx": vramx, "model": model})
    assert str(vramx.report(model)) == applied


def test_names_are_written_as_ranges() -> None:
    names = [f"model.layers.{i}.block" for i in range(12)] + ["lm_head", "a.7", "a.8", "a.08"]
    written = _list_of(names)
    assert eval(written) == names
    assert written.startswith("[*(f'model.layers.{i}.block' for i in range(0, 12)), 'lm_head'")
    odd = ["a.{b}.0", "a.{b}.1", "a.{b}.2"]
    assert eval(_list_of(odd)) == odd


def test_progress_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr(ProgressBar, "show", lambda self, label, done, total: shown.append(label))
    vramx.plan(Stack(2), rows(64), levels=LEVELS)
    assert list(dict.fromkeys(shown)) == [
        "plan: the model as it is",
        "plan: a step that keeps least",
        "plan: measuring blocks",
        "plan: running what should be the fastest",
    ]


def test_a_model_with_a_module_of_torch_script_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)))
    with pytest.raises(InvalidValueError, match="1 is of TorchScript"):
        vramx.plan(model, torch.ones(2, 4), budget=None)
