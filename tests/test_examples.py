"""The examples, on a processor: each is run as a user starts it, and says what its header promises.

In this process, where importing torch is paid for already, or in two that are forked from one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed_tools import run_on_two
from torch import distributed

pytest.importorskip("vramx._core", reason="the compiled core is not built")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LEVELS = ("left", "int8")  # in the table of a prediction

Start = Callable[..., str]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Run an example as `python examples/NAME.py ARGUMENTS`; return what it printed."""

    def run(name: str, *arguments: str) -> str:
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\bloss'?:? '?([\d.]+)", text)]


def saved_ratio(text: str) -> float:
    found = re.search(r"saved [\d.]+ \w+ -> [\d.]+ \w+ \(([\d.]+)x\)", text)
    assert found is not None, text
    return float(found[1])


def test_diffusion_packs_what_its_network_saves(start: Start) -> None:
    said = start("diffusion", "--steps", "3", "--batch", "2")
    assert len(losses(said)) == 3
    assert saved_ratio(said) > 2  # of float32: four bytes became one, and convolutions save most
    assert "no CUDA memory" not in said


def test_a_graph_network_is_predicted_before_it_trains(start: Start) -> None:
    said = start("gnn", "--steps", "8")
    header, row = said.splitlines()[:2]
    assert header.split()[1:5] == ["live", "native", "expandable", "vramx"]
    live, native, _, ours = (float(each) for each in re.findall(r"([\d.]+) MiB", row)[:4])
    assert live <= ours < native
    assert said.splitlines()[-1] == "training: no CUDA memory was used"


def test_a_graph_network_needs_no_library_for_graphs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    assert "MeanSage" in start("gnn", "--steps", "4")


def fsdp2(rank: int) -> dict[str, Any]:
    """Be a process that torchrun has started; its group is there already."""
    os.environ["RANK"] = str(rank)
    sys.argv = ["fsdp2.py", "--steps", "2"]
    distributed.init_process_group = distributed.destroy_process_group = lambda *_: None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLES / "fsdp2.py"), run_name="__main__")
    return {"said": said.getvalue()}


@pytest.mark.slow
def test_fsdp2_starts_itself_and_optimises_every_process_alike(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "execv", lambda _, words: sys.exit(" ".join(words)))
    launch = r"-m torch.distributed.run --standalone --nproc-per-node=2 \S*fsdp2.py --steps 2"
    with pytest.raises(SystemExit, match=launch):
        start("fsdp2", "--steps", "2")
    first, second = (each["said"] for each in run_on_two(fsdp2, tmp_path))
    assert len(losses(first)) == 2
    assert "fused, int8, as EncoderLayer" in first
    assert second == ""


def test_a_trainer_trains_an_optimised_llama(start: Start) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    said = start("hf_trainer", "--steps", "2")
    (left,), (int8,) = (re.findall(rf"^{level} +([\d.]+) GiB", said, re.M) for level in LEVELS)
    assert float(int8) < 0.8 * float(left)  # as is measured on a GPU
    assert re.search(r"LlamaDecoderLayer +int8", said)
    assert "without logits" in said
    assert len([line for line in said.splitlines() if "'grad_norm'" in line]) == 2


def test_lightning_trains_with_packed_activations(start: Start) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    said = start("lightning_module", "--steps", "2")
    assert "after 2 steps" in said
    assert saved_ratio(said) > 2


def test_a_llama_is_planned_and_trained(start: Start) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    said = start("train_3b", "--size", "tiny", "--steps", "3", "--budget", "1GiB")
    assert len(losses(said)) == 3
    assert losses(said)[-1] < losses(said)[0] < 7  # log(300) is 5.7
    assert "budget 1.00 GiB" in said
    assert re.search(r"model\.layers\.3 +LlamaDecoderLayer", said)


def test_the_notebook_explains_a_failure_a_leak_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = json.loads((EXAMPLES / "oom_debug.ipynb").read_text())
    monkeypatch.chdir(EXAMPLES)  # as Jupyter has it
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "outputs are not kept in the repository"
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    said = capsys.readouterr().out
    assert "the cause: fragmentation_or_size" in said
    assert re.search(r"vramx +needs \d+ MiB", said)
    assert "leak: leak.py:9 train" in said
    assert "memory.html: " in said or "plotly" in said


def test_every_example_is_in_the_table_and_says_what_it_needs() -> None:
    table = (EXAMPLES / "README.md").read_text()
    files = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"), EXAMPLES / "libtorch" / "main.cpp"]
    assert len(files) == 8
    for path in files:
        name = path.relative_to(EXAMPLES).as_posix()
        assert f"[`{name}`]({name})" in table
        text = path.read_text().replace("**", "")
        for word in ("What it shows:", "What to expect:", "Needs:"):
            assert word in text, f"{name} does not say {word}"
