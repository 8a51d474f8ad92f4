"""A program that is recorded is left as it was, and told what is wrong with its arguments."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_history import CpuHistory
from record_tools import (
    PROGRAMS,
    WIDTH,
    Residual,
    category_of,
    convolutions,
    features,
    path,
    recorder,
    residuals,
    train,
)
from torch import nn
from torch.nn.modules import module as modules

import vramx
from vramx.memory import categories as names
from vramx.memory.history import TICK_BYTES, CudaHistory
from vramx.memory.snapshot import Snapshot
from vramx.patch.watching import has_other_hooks

__all__ = ["path"]


def hooks() -> list[Any]:
    from torch.optim import optimizer as optimizers

    from vramx.compression import packs

    kinds = ("pre_hooks", "hooks", "hooks_always_called", "hooks_with_kwargs")
    return [
        *(list(getattr(modules, f"_global_forward_{kind}")) for kind in kinds),
        list(optimizers._global_optimizer_pre_hooks),
        list(optimizers._global_optimizer_post_hooks),
        list(packs.watchers),
        nn.Module.__call__,
        torch.autograd._engine_run_backward,
        torch.autograd.graph._engine_run_backward,
    ]


def test_the_hooks_of_a_recording_are_no_reason_to_call_the_parts_of_a_fused_block(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorder(path, CpuHistory(), residuals()):
        assert not has_other_hooks()
        handle = modules.register_module_forward_hook(lambda *_: None)
        assert has_other_hooks()
        handle.remove()
        assert not has_other_hooks()
    original = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda module, x: original(module, 2 * x))
    with recorder(path, CpuHistory(), residuals()):
        assert has_other_hooks()  # the program's call, behind the recording's


def test_a_failing_program_writes_its_file_and_leaves_no_hook(path: Path) -> None:
    before = hooks()
    model = residuals()

    def fail() -> None:
        with recorder(path, CpuHistory(), model):
            model(*features()[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hooks() == before
    assert Snapshot.load(path).has_categories


def test_a_module_that_fails_is_a_call_that_ends(path: Path) -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    model, source = nn.Sequential(residuals(), Failing()), CpuHistory()
    with recorder(path, source, model):
        with pytest.raises(ZeroDivisionError):
            model(*features()[0])
        gc.collect()
        late = torch.empty(100_003, dtype=torch.uint8)
    assert category_of(Snapshot.load(path), 100_003)[0] == names.UNKNOWN
    del late


def test_a_file_that_cannot_be_written_is_an_error_and_hides_no_other(
    tmp_path: Path, logged: Any
) -> None:
    folder = tmp_path / "gone"

    def lose_the_folder(error: type[Exception] | None) -> None:
        folder.mkdir()
        with recorder(folder / "run.pickle", CpuHistory()):
            folder.rmdir()
            if error is not None:
                raise error

    with pytest.raises(vramx.VramxError, match="cannot be written"):
        lose_the_folder(None)
    with pytest.raises(ZeroDivisionError):
        lose_the_folder(ZeroDivisionError)
    assert "was not written" in logged.getvalue()


def test_results_are_the_same_while_recording(path: Path) -> None:
    results = []
    for records in (False, True):
        torch.manual_seed(0)
        model = convolutions()
        optimizer = torch.optim.AdamW(model.parameters())
        watching = recorder(path, CpuHistory(), model, optimizer) if records else nullcontext()
        with watching:
            train(model, optimizer, PROGRAMS["convolutions"][1])
        results.append([p.detach().clone() for p in model.parameters()])
    for plain, watched in zip(*results, strict=True):
        assert torch.equal(plain, watched)


def test_models_are_copied_and_pickled_while_recording(path: Path) -> None:
    model = residuals()
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder(path, CpuHistory(), model, optimizer):
        copied = copy.deepcopy(model)
        pickle.dumps(model)
        copy.deepcopy(optimizer)
    for part in (*model.modules(), *copied.modules()):
        assert not part._forward_hooks
        assert not part._forward_pre_hooks


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_compiled_modules_run_as_they_do(when: str, path: Path) -> None:
    class Silent:
        """A source without events, since no dispatch mode may stand before the compiler."""

        device_type = "cpu"

        def start(self, max_entries: int, stacks: str) -> None: ...
        def tick(self) -> None: ...
        def finish(self) -> dict[str, Any]:
            return {"segments": [], "device_traces": [[]]}

        def workspace_sizes(self) -> tuple[int, ...]:
            return ()

        def outside_bytes(self) -> list[int]:
            return []

    torch._dynamo.reset()
    model = nn.Sequential(Residual(), Residual())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, WIDTH)
    if when == "before":
        compiled(x).sum().backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with recorder(path, Silent(), model):  # type: ignore[arg-type]
            out = compiled(x)
            out.sum().backward()
    assert torch.equal(out, model(x))
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    assert made <= 1  # what was compiled before, torch 2.6 compiles once more for any hook


def test_a_second_recording_is_refused(path: Path) -> None:
    with recorder(path, CpuHistory()):
        torch.zeros(4)
        with pytest.raises(vramx.VramxError, match="is being recorded"):
            recorder(path, CpuHistory()).start()
    with recorder(path, CpuHistory()):  # the first has made room
        torch.zeros(4)


def test_start_and_stop_do_the_same_and_the_history_gets_the_options(path: Path) -> None:
    source = CpuHistory()
    recording = recorder(path, source, max_entries=77)
    recording.start()
    torch.zeros(4)
    assert recording.stop() == path
    assert source.options == (77, "python")
    with pytest.raises(vramx.VramxError, match="is not being recorded"):
        recording.stop()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_record(path: Path) -> None:
    with pytest.raises(vramx.VramxError, match="no CUDA device"), vramx.record(path):
        pass
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"path": 7}, "path 7"),
        ({"model": "resnet"}, "model 'resnet'"),
        ({"optimizer": 0.1}, "optimizer 0.1"),
        ({"optimizer": [0.1]}, "optimizer 0.1"),
        ({"max_entries": 0}, "max_entries 0"),
        ({"max_entries": True}, "max_entries True"),
        ({"stacks": "c++"}, "accepted are python, all"),
    ],
)
def test_what_is_not_accepted_is_named(arguments: dict[str, Any], said: str, path: Path) -> None:
    with pytest.raises(vramx.VramxError, match=said):
        vramx.record(**{"path": path, **arguments})


def test_a_folder_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(vramx.VramxError, match="is no folder"):
        recorder(tmp_path / "gone" / "run.pickle", CpuHistory()).start()


def test_a_tick_makes_no_tensor_that_a_transform_or_a_trace_would_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda size: size)
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", freed.append)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        assert CudaHistory().tick() is not None
        return x * 2

    torch.func.vmap(doubled)(torch.ones(2))
    assert "empty" not in str(torch.jit.trace(doubled, torch.ones(2), check_trace=False).graph)
    assert freed == [TICK_BYTES] * 2


def test_a_tick_that_finds_no_memory_is_no_failure_of_the_program(path: Path) -> None:
    class Full(CpuHistory):
        def tick(self) -> None:
            self._log("oom", 0, TICK_BYTES)

    model, source = residuals(), Full()
    with recorder(path, source, model):
        model(*features()[0])
        source._log("oom", 0, 1 << 40)
    snapshot = Snapshot.load(path)
    assert [failure.size_bytes for failure in snapshot.failures] == [1 << 40]
    assert names.PARAMETERS in snapshot.categories


def test_torch_starts_a_history_with_the_words_that_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def older(
        enabled: Any = "all",
        context: Any = "all",
        stacks: str = "all",
        max_entries: int = 1,
        device: Any = None,
    ) -> None:
        asked.append((enabled, context, stacks, max_entries))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", older)
    CudaHistory().start(77, "python")
    assert asked == [("all", "alloc", "python", 77)]
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    with pytest.raises(vramx.VramxError, match="being recorded already"):
        CudaHistory().start(77, "python")
    assert len(asked) == 1
