"""vramx.record on a GPU: torch's own history, under either allocator, to the byte.

Run it under both: `--allocator native` records torch's allocator, and by default vramx's.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from record_tools import PROGRAMS, WIDTH, Kept, by_category, loss_of, path, storage_bytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import vramx
from gpu.tools import MIB, block, captured, failure_of, room
from vramx.memory import categories as names
from vramx.memory import history
from vramx.memory.snapshot import Snapshot
from vramx.memory.stacks import describe
from vramx.nn import Linear, RMSNorm, SiLU

__all__ = ["path"]
pytestmark = pytest.mark.gpu

# Of a tensor that says, in the history, when something was.
SIGN_BYTES = 777


def program(name: str) -> tuple[Any, Any]:
    """Return a model on the GPU, and what makes batches for it."""
    torch.manual_seed(0)
    make, batch = PROGRAMS[name]

    def batch_on_gpu() -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = batch()
        return tuple(x.cuda() for x in args), {key: x.cuda() for key, x in kwargs.items()}

    return make().cuda(), batch_on_gpu


def sign() -> None:
    """Leave a mark in the history: memory that is freed at once, a temporary."""
    block(SIGN_BYTES)


def event_of_sign(snapshot: Snapshot) -> int:
    """Return the event at which the sign was given."""
    (number,) = (snapshot.allocations.size == SIGN_BYTES).nonzero()[0]
    return int(snapshot.event[snapshot.rows_of_allocation[number]])


def listed(snapshot: Snapshot, event: int, category: str) -> str:
    """Return each block of a category: its bytes, its module and its lines, the largest first."""
    blocks, number = snapshot.allocations, snapshot.categories.index(category)
    live = [each for each in snapshot.live_at(event) if blocks.category[each] == number]
    return "\n".join(
        f"{blocks.size[each]} {snapshot.labels[blocks.label[each]]} "
        f"{describe(snapshot.stacks[blocks.stack[each]])}"
        for each in sorted(live, key=lambda each: -blocks.size[each])
    )


def block_bytes_at(snapshot: Snapshot, event: int) -> int:
    return int(snapshot.block_bytes[snapshot.live_at(event)].sum())


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_categories_sum_to_what_torch_counts(
    name: str, amp: bool, path: Path, allocator: str
) -> None:
    model, batch = program(name)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.reset_peak_memory_stats()
    with vramx.record(path, model, optimizer):
        for _ in range(3):
            args, kwargs = batch()
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                loss = loss_of(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    allocated, stats = torch.cuda.memory_allocated(), torch.cuda.memory_stats()
    snapshot = vramx.Snapshot.load(path)
    found = by_category(snapshot, snapshot.peak_event)
    assert set(found) <= set(names.CATEGORIES)
    assert sum(found.values()) == stats["requested_bytes.all.peak"]
    at_end = by_category(snapshot, snapshot.end_event)
    assert sum(at_end.values()) == stats["requested_bytes.all.current"]
    assert block_bytes_at(snapshot, snapshot.end_event) == allocated
    assert snapshot.peak_block_bytes == stats["allocated_bytes.all.peak"]


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_moment_before_backward_holds_what_is_counted_there(
    name: str, amp: bool, path: Path
) -> None:
    model, batch = program(name)
    optimizer = torch.optim.AdamW(model.parameters())
    with vramx.record(path, model, optimizer):
        args, kwargs = batch()
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        args, kwargs = batch()
        kept = Kept(model)
        with kept.watching(), torch.autocast("cuda", torch.bfloat16, enabled=amp):
            out = model(*args, **kwargs)
            loss = loss_of(out)
        sign()
        on_gpu = [s for s in kept.storages.values() if s.device.type == "cuda"]
        kept.storages = {s.data_ptr(): s for s in on_gpu}
        inputs = [*args, *kwargs.values()]
        activation_bytes = kept.bytes(out, loss, *inputs) - storage_bytes(inputs)
        del on_gpu
        kept.storages.clear()
        loss.backward()
        del loss, out
    snapshot = vramx.Snapshot.load(path)
    found = by_category(snapshot, event_of_sign(snapshot))
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert found[names.PARAMETERS] == storage_bytes(model.state_dict().values())
    assert found[names.OPTIMIZER] == storage_bytes(t for t in states if t.is_cuda)
    assert found[names.INPUTS] == storage_bytes(inputs)
    of_activations = listed(snapshot, event_of_sign(snapshot), names.ACTIVATIONS)
    assert found[names.ACTIVATIONS] == activation_bytes, of_activations
    assert names.GRADIENTS not in found


def test_packs_of_fused_modules_are_packed(path: Path) -> None:
    plain = nn.Sequential(nn.RMSNorm(512), nn.Linear(512, 512), nn.SiLU()).cuda()
    fused = nn.Sequential(RMSNorm(512), Linear(512, 512), SiLU()).cuda()
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    kept = []
    for model in (plain.bfloat16(), fused.bfloat16()):
        with vramx.record(path, model):
            out = model(x)
            sign()
            out.sum().backward()
        snapshot = vramx.Snapshot.load(path)
        kept.append(by_category(snapshot, event_of_sign(snapshot)))
    assert names.PACKED not in kept[0]
    assert 0 < kept[1][names.PACKED] < kept[0][names.ACTIVATIONS]


def test_a_workspace_of_cublas_is_told_apart(path: Path) -> None:
    torch._C._cuda_clearCublasWorkspaces()
    model, batch = program("residuals")
    with vramx.record(path, model):
        model(*batch()[0]).sum().backward()
    snapshot = vramx.Snapshot.load(path)
    *of_cublas, of_cublaslt = history.CudaHistory().workspace_sizes()
    found = by_category(snapshot, snapshot.end_event)
    # One of each for forward and for backward; cuBLASLt's own may be that of cuBLAS.
    expected = {n * a + m * of_cublaslt for a in of_cublas for n in (1, 2) for m in (0, 1, 2)}
    assert found[names.WORKSPACES] in expected


def test_the_clock_is_that_of_the_history(path: Path) -> None:
    model, batch = program("residuals")
    with vramx.record(path, model):
        model(*batch()[0])
    assert pickle.loads(path.read_bytes())["vramx"]["clock_error_us"] < history._COARSE_ERROR_US


def test_out_of_memory_leaves_a_file_that_names_the_request(path: Path) -> None:
    model, batch = program("residuals")

    def run() -> None:
        with vramx.record(path, model):
            model(*batch()[0]).sum().backward()
            with room(64 * MIB):
                block(256 * MIB)

    failure_of(run)
    snapshot = vramx.Snapshot.load(path)
    assert [failure.size_bytes for failure in snapshot.failures] == [256 * MIB]
    found = by_category(snapshot, snapshot.failures[-1].event)
    assert found[names.GRADIENTS] > 0


def test_a_recording_ends_torchs_history(path: Path) -> None:
    with vramx.record(path):
        block(MIB)
        assert torch._C._cuda_isHistoryEnabled()
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_history_that_is_recorded_already_is_left_alone(path: Path) -> None:
    torch.cuda.memory._record_memory_history(max_entries=100, stacks="python")
    try:
        with pytest.raises(vramx.VramxError, match="being recorded already"):
            vramx.record(path).start()
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_a_graph_is_captured_while_recording(path: Path) -> None:
    model, _ = program("residuals")
    x = torch.randn(8, WIDTH, device="cuda")
    with vramx.record(path, model), torch.no_grad():
        graph, out = captured(lambda: model(x))
        graph.replay()
        expected = model(x)
    torch.testing.assert_close(out, expected)
    assert vramx.Snapshot.load(path).has_categories


def test_a_compiled_model_is_recorded(path: Path) -> None:
    model, _ = program("residuals")
    compiled = torch.compile(model)
    torch.cuda.reset_peak_memory_stats()
    with vramx.record(path, model):
        for _ in range(2):
            compiled(torch.randn(8, WIDTH, device="cuda")).sum().backward()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    snapshot = vramx.Snapshot.load(path)
    assert sum(by_category(snapshot, snapshot.peak_event).values()) == peak


def test_a_tick_is_no_operation_of_the_program() -> None:
    """It comes at any time: within transforms, traces and modes, which see no tensor of it."""
    ticks: list[Any] = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        ticks.append(history.CudaHistory().tick())
        return x * 2

    x = torch.ones(3, device="cuda", requires_grad=True)
    assert torch.equal(torch.func.vmap(doubled)(x), 2 * x)
    assert torch.equal(torch.func.grad(lambda x: doubled(x).sum())(x), torch.full_like(x, 2))
    assert "empty" not in str(torch.jit.trace(doubled, x, check_trace=False).graph)
    with FakeTensorMode():
        doubled(torch.empty(3, device="cuda"))
    assert len(ticks) == 4
    assert all(tick.address for tick in ticks)
