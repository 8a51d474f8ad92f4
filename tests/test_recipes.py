"""The recipes: each variant trains on a CPU, and the pages say what scripts and rows have."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_tools import start_server
from program_stand_ins import machine_with

from benchmarks import recipes
from benchmarks.harness import Options
from benchmarks.programs import _launch
from benchmarks.programs._launch import ALLOCATORS, Job
from benchmarks.programs._recipes import lines

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES = sorted(recipes.PAGES.glob("*.md"))
# Those of whole processes are tested apart.
HERE = [case for case in recipes.all_cases() if not case.startswith("several_gpus/")]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A logit is rounded to bfloat16, which keeps 8 bits, and none of an untrained model reaches 1: a
# loss that is computed in other parts differs by no more.
ROUNDING = 2.0**-8

common: Any = recipes.script("common")


@cache
def figures(case: str) -> dict[str, Any]:
    recipe, _, variant = case.partition("/")
    place = common.Place(torch.device("cpu"), small=True)
    found: dict[str, Any] = common.run(recipes.script(recipe).VARIANTS, variant, place)
    return found


def losses(case: str) -> list[float]:
    found: list[float] = figures(case)["losses"]
    return found


# --- the scripts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", HERE)
def test_a_variant_runs_or_names_what_it_lacks(case: str) -> None:
    found = figures(case)
    if found["status"] != "ok":
        assert re.fullmatch(r"not installed: \w+|not run: .+ needs .+", found["status"])
        pytest.skip(found["status"])
    assert all(math.isfinite(loss) for loss in found.get("losses", []))
    assert any(found.get(metric) is not None for metric in recipes.UNITS) or "host" in case


@pytest.mark.parametrize(
    ("case", "exact"),
    [
        ("checkpointing/each_block", "checkpointing/nothing"),
        ("checkpointing/every_second", "checkpointing/nothing"),
        ("checkpointing/feed_forward", "checkpointing/nothing"),
        ("offload/save_on_cpu", "offload/nothing"),
        ("offload/states_vramx", "offload/nothing"),
        ("offload/states_vramx_in_backward", "offload/nothing"),
        ("small_states/on_the_host", "small_states/adamw_fused"),
        ("evaluation/no_grad", "evaluation/graph_kept"),
        ("evaluation/inference_mode", "evaluation/graph_kept"),
        ("evaluation/logits_kept", "evaluation/graph_kept"),
        ("reinforcement/empty_cache_between", "reinforcement/in_turn"),
        ("reinforcement/vramx_allocator_states_on_host", "reinforcement/in_turn"),
        ("folklore/empty_cache_each_step", "folklore/plain"),
    ],
)
def test_what_changes_no_result_has_the_same_losses_bit_for_bit(case: str, exact: str) -> None:
    assert losses(case) == losses(exact)


@pytest.mark.parametrize(
    ("case", "whole"),
    [
        ("accumulation/two_parts", "accumulation/one_batch"),
        ("accumulation/four_parts", "accumulation/one_batch"),
        ("evaluation/loss_in_pieces", "evaluation/no_grad"),
    ],
)
def test_what_is_computed_in_parts_has_the_losses_of_the_whole(case: str, whole: str) -> None:
    assert losses(case) == pytest.approx(losses(whole), abs=ROUNDING)


def test_training_changes_the_loss() -> None:
    first, second = losses("checkpointing/nothing")
    assert abs(second - first) > ROUNDING


def test_autocast_halves_neither_parameters_nor_states() -> None:
    whole, cast, half = (
        figures(f"amp/{name}") for name in ("float32", "bf16_autocast", "bf16_weights")
    )
    for metric in ("parameters_bytes", "states_bytes"):
        assert cast[metric] == whole[metric]
    assert half["parameters_bytes"] == whole["parameters_bytes"] // 2


def test_nothing_can_be_trained_of_a_model_that_torch_quantization_made_small() -> None:
    found = figures("folklore/quantize_dynamic")
    assert found["trainable_before"] > 0
    assert found["trainable_after"] == 0


def test_batches_by_tokens_have_every_document_once_and_stay_below_the_limit() -> None:
    module = recipes.script("dynamic_batches")
    documents = common.lengths(common.Place(torch.device("cpu"), small=True), 200)
    batches = list(module.batches_by_tokens(documents, limit=256))
    assert sorted(length for batch in batches for length in batch) == sorted(documents)
    assert all(max(batch) * len(batch) <= 256 for batch in batches)


def test_a_sliding_window_says_of_each_voxel_what_the_model_says() -> None:
    module = recipes.script("patches_3d")
    volume = torch.randint(-9, 9, (1, 1, 11, 8, 9)).float()  # whose sums are exact
    assert torch.equal(module.sliding_window(volume, 4, lambda cube: 2 * cube), 2 * volume)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    where = f"file://{tmp_path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrap", ["wrap_ddp", "wrap_ddp_bucket_view", "wrap_fsdp2", "wrap_fsdp2_int8"]
)
def test_a_wrapped_model_trains_as_the_plain_one(
    wrap: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    module = recipes.script("several_gpus")
    place = common.Place(torch.device("cpu"), small=True)
    found = module.trained(place, getattr(module, wrap))["losses"]
    assert found == pytest.approx(losses("checkpointing/nothing"), abs=ROUNDING)


@pytest.mark.skipif(
    find_spec("transformers") is not None,
    reason="each process would import transformers, for which conftest.py prepares this one alone",
)
def test_two_processes_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    module = recipes.script("several_gpus")
    start_server()  # and fork, so that neither process imports torch
    start = partial(module.processes.start_processes, start_method="forkserver")
    monkeypatch.setattr(module.processes, "spawn", start)
    place = common.Place(torch.device("cpu"), small=True)
    found = module.fsdp2(place)
    assert found["ranks"] == 2
    assert all(math.isfinite(loss) for loss in found["losses"])


def test_a_script_prints_a_line_for_each_variant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(recipes.SCRIPTS / "accumulation.py")
    monkeypatch.setattr(sys, "argv", [script, "--small", "--variant", "two_parts"])
    runpy.run_path(script, run_name="__main__")
    (line,) = (json.loads(text) for text in capsys.readouterr().out.splitlines())
    assert (line["recipe"], line["variant"], line["status"]) == ("accumulation", "two_parts", "ok")
    assert line["step_ms"] > 0


# --- the benchmark --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "said"),
    [("not installed: peft", "not installed: peft"), ("out of memory", "failed: out of memory")],
)
def test_what_could_not_be_measured_is_one_line_that_says_why(found: str, said: str) -> None:
    assert lines("lora/lora", {"status": found}) == [{"case": "lora/lora", "status": said}]


def test_figures_become_lines_with_their_units() -> None:
    found = {"status": "ok", "losses": [5.0], "step_ms": [1.0, 2.0], "peak_reserved_bytes": 7}
    assert [(each["metric"], each["values"]) for each in lines("amp/float32", found)] == [
        ("peak_reserved_bytes", [7]),
        ("step_ms", [1.0, 2.0]),
    ]


def test_a_recipes_name_is_all_of_its_variants() -> None:
    known = ["amp/a", "amp/b", "caps/a"]
    assert recipes.expanded(("amp", "caps/a"), known) == ("amp/a", "amp/b", "caps/a")
    assert recipes.expanded(("nothing",), known) == ("nothing",)


def test_a_variant_has_its_allocator_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "load_core", machine_with(2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def prepared(case: str) -> Job:
        return recipes.prepared(Job(Path("x"), ALLOCATORS[0], (case,), gpu="0"), Options())

    assert prepared("folklore/vramx_allocator").allocator.name == "vramx"
    assert prepared("folklore/expandable_segments").allocator.name == "expandable"
    assert prepared("offload/states_vramx").allocator.name == "native"
    assert prepared("offload/nothing").gpu == "0"
    assert prepared("several_gpus/ddp").gpu == "0,1"


def row(case: str, metric: str, median: str, status: str = "ok") -> dict[str, str]:
    place = {"gpu": "A GPU", "driver": "1.2", "torch": "2.11", "commit": "0123456789ab"}
    return {"case": case, "metric": metric, "median": median, "status": status, **place}


def test_a_table_has_the_newest_figures_and_the_reason_where_there_are_none() -> None:
    rows = [
        row("amp/a", "step_ms", "11"),
        row("amp/a", "peak_reserved_bytes", str(3 << 30)),
        row("amp/b", "", "", "not installed: torchao"),
        row("caps/a", "step_ms", "99"),
        row("amp/a", "step_ms", "12"),
    ]
    assert recipes.page_table("amp", rows)[:4] == [
        "| amp | peak reserved | step |",
        "| --- | ---: | ---: |",
        "| a | 3.00 GiB | 12 ms |",
        "| b | not installed: torchao |  |",
    ]


def test_a_failure_that_is_older_than_a_measurement_is_not_shown() -> None:
    rows = [row("amp/a", "", "", "failed: out of memory"), row("amp/a", "step_ms", "5")]
    assert "| a | 5.00 ms |" in recipes.page_table("amp", rows)
    assert recipes.page_table("amp", rows[:1]) == ["Not measured yet."]


# --- the pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_each_recipe_has_a_page_with_its_table_and_its_command(recipe: str) -> None:
    text = (recipes.PAGES / f"{recipe}.md").read_text()
    assert f"<!-- recipe {recipe} -->" in text
    assert f"examples/recipes/{recipe}.py" in text
    assert SNIPPET.search(text)
    for name in recipes.script(recipe).VARIANTS:
        assert f"`{name}`" in text, "each variant is explained"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_lines_of_a_page_stand_in_its_script(page: Path) -> None:
    path = recipes.SCRIPTS / f"{page.stem}.py"
    for snippet in SNIPPET.findall(page.read_text()):
        assert stands_in(snippet, path.read_text()), snippet


def stands_in(snippet: str, script: str) -> bool:
    """Say whether these lines follow each other in a script, at whatever depth."""
    wanted = snippet.rstrip().splitlines()
    having = script.splitlines()
    parts = (having[at : at + len(wanted)] for at in range(len(having)))
    return any(textwrap.dedent("\n".join(part)).splitlines() == wanted for part in parts)


def test_lines_that_a_script_has_otherwise_are_noticed() -> None:
    script = "def f():\n    a = 1\n    b = 2\n"
    assert stands_in("a = 1\nb = 2\n", script)
    assert not stands_in("a = 1\nb = 3\n", script)
    assert not stands_in("b = 2\na = 1\n", script)
