"""README.md and docs/: what is made is as it would be, snippets run, links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import documents
import pytest
import torch
from documents import PAGES, Snippet
from torch import nn

import vramx
from benchmarks.documents.pages import remade
from benchmarks.documents.tables import TABLES
from benchmarks.harness import ROOT
from vramx.cli.main import VERBS
from vramx.compression.config import Compression

README_LINES, README_WORDS = 150, 1200
# Figures that are no measurements: what the code is set to, or what a question asks for.
STATED = {
    "1.047": "bytes of an element in int8: test_bytes_of_an_element",
    "0.25 %": "what a plan leaves free: vramx/planning",
    "2 %": "the tolerance of vramx check",
    "0.999": "the least cosine that tests/test_outlier_channels.py accepts",
    "1000 times": "the outliers of that test",
    "1.03 times": "the limit of benchmarks/torch_programs.py",
    "90 %": "the interval of benchmarks/language_model.py",
}
# Recipes have a test of their own, which runs the programs that their lines are from.
OWN = [page for page in PAGES if not re.match(r"docs/recipes/(?!index)", page)]
SNIPPETS = [snippet for page in OWN for snippet in documents.snippets(page)]
# These have nothing to do without a GPU: their arguments are checked, and nothing is done.
OF_GPU = (
    *("install_allocator", "allocator_stats", "set_limit", "defragment"),
    *("record", "fit_batch"),
)
LIBRARIES = ("transformers", "lightning", "peft", "accelerate")


# --- what is made ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_what_is_made_is_as_it_would_be_made(page: str) -> None:
    text = PAGES[page].read_text()
    assert remade(text) == text, "python -m benchmarks.documents --write makes it anew"


@pytest.mark.parametrize(
    ("figure", "after"),
    [
        (r"(3 B, 24 GiB: `plan` \| )[\d.]+", r"\g<1>13.8"),  # in a table
        (r"(-->)[\d.]+(<!-- end -->)", r"\g<1>99\2"),  # in a sentence
        (r"(-->)[\d.]+(<!-- end -->)", r"\1\2"),
    ],
)
def test_a_figure_that_parts_from_the_rows_is_found(figure: str, after: str) -> None:
    text = (ROOT / "README.md").read_text()
    changed = re.sub(figure, after, text, count=1)
    assert changed != text
    assert remade(changed) == text


@pytest.mark.parametrize(
    "marked", ["<!-- table none -->", "<!-- = train: none: tokens_per_s: .0f -->", "<!-- = 1 -->"]
)
def test_what_cannot_be_made_is_an_error(marked: str) -> None:
    with pytest.raises(LookupError):
        remade(f"{marked}<!-- end -->")


def test_a_table_of_one_gpu_has_no_run_of_another() -> None:
    places = {name: TABLES[name].run().place for name in ("train", "train-h100")}
    assert "H100" not in places["train"]
    assert "H200" not in places["train-h100"]
    with pytest.raises(LookupError, match="no run on NVIDIA A100 has"):
        replace(TABLES["train"], gpu="NVIDIA A100").run()


# --- figures by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", OWN)
def test_no_measured_figure_is_written_by_hand(page: str) -> None:
    found = documents.figures(PAGES[page].read_text())
    assert [figure for figure in found if figure not in STATED] == []


@pytest.mark.parametrize(
    "planted", ["takes 0.98 of it", "in 163 ms", "by 12 % more", "3 times less"]
)
def test_a_planted_figure_is_found(planted: str) -> None:
    text = (ROOT / "README.md").read_text()
    more = documents.figures(f"{text}\n\nIt {planted}.\n")
    assert len(more) == len(documents.figures(text)) + 1


def test_bytes_of_an_element() -> None:
    layout = Compression().format()
    assert f"{1 + 6 / layout.group_size:.3f}" == "1.047"


# --- README and the pages -------------------------------------------------------------------------


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES
    assert len(text.split()) <= README_WORDS


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert documents.broken_links(PAGES[page], PAGES[page].read_text()) == []


@pytest.mark.parametrize("link", ["[a](gone.md)", "[a](docs/plans.md#gone)", "![a](docs/gone.png)"])
def test_a_link_that_leads_nowhere_is_found(link: str) -> None:
    assert len(documents.broken_links(ROOT / "README.md", link)) == 1


def test_every_public_name_is_in_the_api() -> None:
    named = set(re.findall(r"^::: vramx\.(\w+)$", PAGES["docs/api.md"].read_text(), re.M))
    assert set(vramx.__all__) - {"__version__"} <= named


def test_every_verb_has_its_help() -> None:
    named = re.findall(r"<!-- help (\w+) -->", PAGES["docs/command-line.md"].read_text())
    assert sorted(named) == sorted(VERBS)


# --- snippets -------------------------------------------------------------------------------------


class Network(nn.Module):
    """Repeated blocks, of a shape that is quick."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(DecoderLayer(), DecoderLayer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class DecoderLayer(nn.TransformerEncoderLayer):
    """A block; `mask` is what a snippet calls it with."""

    def __init__(self) -> None:
        super().__init__(16, 2, 32, batch_first=True)

    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return super().forward(x, src_mask=mask)


def stand_ins(folder: Path) -> dict[str, Any]:
    """Return what snippets speak of without making it."""
    torch.manual_seed(0)
    model, batch = Network(), torch.randn(2, 4, 16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(_: Any = None) -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()

    return {
        "vramx": vramx,
        "torch": torch,
        "pytest": marks(),
        "Network": Network,
        "DecoderLayer": DecoderLayer,
        "model": model,
        "optimizer": optimizer,
        "block": model.layers[0],
        **dict.fromkeys(("batch", "x"), batch),
        "batches": [batch],
        "loader": torch.utils.data.DataLoader(batch, batch_size=2),  # type: ignore[arg-type]
        "mask": None,
        **dict.fromkeys(("step", "step_of", "evaluate_of", "train_step"), step),
        "name": str(folder / "llama"),
        "dataset": [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 4,
    }


def marks() -> Any:
    """Return the marks of the plugin, whose registration needs an installed package."""
    return SimpleNamespace(
        mark=SimpleNamespace(vram_limit=lambda _: lambda f: f, vram_leak=lambda f: f)
    )


def write_llama(folder: str) -> None:
    """Write a small language model, in the place of one that is downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder)


def without_gpu(patch: pytest.MonkeyPatch) -> None:
    """Have what needs a GPU check its arguments only."""
    for name in OF_GPU:
        real = getattr(vramx, name)

        def call(*args: Any, _real: Any = real, **kwargs: Any) -> Any:
            inspect.signature(_real).bind(*args, **kwargs)
            return MagicMock()

        patch.setattr(vramx, name, call)
    for name in ("_record_memory_history", "_dump_snapshot"):
        patch.setattr(torch.cuda.memory, name, create_autospec(getattr(torch.cuda.memory, name)))


def needed_libraries(code: str) -> list[str]:
    return [name for name in LIBRARIES if re.search(rf"^\s*(?:import|from) {name}\b", code, re.M)]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_snippet_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(snippet.code, str(snippet), "exec")
    missing = [
        name for name in needed_libraries(snippet.code) if not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; it is compiled only")
    if "transformers" in needed_libraries(snippet.code):
        write_llama(str(tmp_path / "llama"))
    monkeypatch.chdir(tmp_path)
    without_gpu(monkeypatch)
    namespace = stand_ins(tmp_path)
    # Classes of a snippet name a module, which libraries look into.
    monkeypatch.setitem(sys.modules, "snippet", SimpleNamespace(**namespace))
    exec(compiled, {**namespace, "__name__": "snippet"})


def test_a_snippet_with_a_wrong_argument_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    for code in ("vramx.install_allocator(limits=1)", "vramx.optimise(model)"):
        with pytest.raises((TypeError, AttributeError)):
            exec(code, stand_ins(tmp_path))
