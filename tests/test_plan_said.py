"""What a plan says: its levels and why, the peak before and after, and the code to write."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
import torch
from plan_tools import PACKED_ROWS, Block, Stack, counted_time, rows, small_device, without_noise
from test_plan import peak_bytes
from torch import Tensor, nn

import vramx
from vramx.errors import InvalidValueError
from vramx.planning.plan_text import _list_of
from vramx.progress import ProgressBar

__all__ = ["counted_time", "small_device", "without_noise"]
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


class Deeper(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Deep() for _ in range(2))


class Dropping(Stack):
    """Leaves another block out of each step, as models with layer drop do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number != self.count % 5:
                x = block(x)
        return self.head(x)


def test_a_model_that_drops_blocks_at_random_is_one_clear_error() -> None:
    with pytest.raises(InvalidValueError, match="calls other blocks in one step than in the next"):
        vramx.plan(Dropping(), rows(PACKED_ROWS))


def test_the_noisiest_level_is_taken_where_nothing_else_fits(without_noise: None) -> None:
    model, sample = Deeper(), rows(PACKED_ROWS)
    plan = vramx.plan(model, sample, "smallest")
    assert "int4" not in plan.words.values()
    assert "int4" not in str(plan)
    forced = plan.with_budget(sample, plan.measured_bytes - 1)
    assert "int4" in forced.words.values()
    assert forced.measured_bytes < plan.measured_bytes
    assert re.search(r"int4 is for \d blocks, as nothing else fits the budget", str(forced))
    same = plan.with_budget(sample, plan.measured_bytes)
    assert "int4" not in same.words.values()


def test_the_noisiest_level_is_taken_where_it_is_allowed() -> None:
    model, sample = Stack(2), rows(PACKED_ROWS)
    plan = vramx.plan(model, sample, levels=("int4",))
    assert set(plan.words.values()) == {"int4"}
    assert "int4 is for 2 blocks, as levels allow it; its gradients are the noisiest" in str(plan)
    without = vramx.plan(model, rows(64), "smallest", levels=("left", "int8"))
    with pytest.raises(InvalidValueError, match="smallest budget"):
        without.with_budget(rows(64), without.measured_bytes - 1)


def test_the_peak_and_the_step_before_are_said() -> None:
    model, sample = Stack(2), rows(PACKED_ROWS)
    plan = vramx.plan(model, sample, "smallest", levels=("left", "recompute_all"))
    assert plan.before_bytes == peak_bytes(model, sample)
    assert plan.measured_bytes < plan.before_bytes
    assert re.search(r"measured; before \d+\.\d+ MiB; budget", str(plan))
    assert re.search(r"step .* measured; before \d+\.\d$", str(plan), re.MULTILINE)


# As torch says it, and as cuBLAS does, which asks for its workspace past torch's error.
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_model_that_does_not_fit_as_it_is_has_no_peak_before(
    small_device: Any, error: type[Exception]
) -> None:
    model, sample = Stack(), rows(512)
    plan = vramx.plan(model, sample, levels=("left", "recompute_all"))
    small_device((plan.measured_bytes + plan.smallest_bytes) // 2, error)
    found = vramx.plan(model, sample, levels=("left", "recompute_all"))
    assert found.before_bytes is None
    assert "before: out of memory" in str(found)


def test_a_notebook_shows_the_same_as_the_text() -> None:
    plan = vramx.plan(Stack(2), rows(64), levels=("left", "recompute_all"))
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + len(plan.rows)
    words = unescape(re.sub(r"<[^>]+>", " ", html)).split()
    assert words == str(plan).split()


class Named(nn.Module):
    """A model whose blocks vramx.optimize knows, with one between them that it does not."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(4)]
        other = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.others = nn.ModuleList(Other(each) for each in other)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.others):
            x = layer(x)
        return x


class Other(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize(
    "levels", [("int8", "left"), ("recompute_all",), ("recompute_mlp", "int8"), ("keep", "left")]
)
@pytest.mark.parametrize("make", [lambda: Stack(4), Named])
def test_the_code_that_is_printed_does_what_apply_does(make: Any, levels: Any) -> None:
    model, sample = make(), torch.randn(2, 16, 32)
    if isinstance(model, Stack):
        sample, levels = rows(64), [x for x in levels if x not in ("keep", "recompute_mlp")]
        if not levels:
            pytest.skip("none of these levels is for its blocks")
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
    vramx.plan(Stack(2), rows(64), levels=("left", "recompute_all"))
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
