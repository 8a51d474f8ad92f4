"""torch's shim serves ordinary requests from the core and leaves the rest to torch's allocator.

Each test but the first runs in a process of its own, on the real shim and the real core, with the
simulated driver below and a stand-in for torch's own allocator behind (tests/torch_stub).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from shim_build import (
    MIB,
    POOL,
    SIDE_STREAM,
    STREAM,
    Bench,
    has_cuda_libraries,
    installed,
    libraries,
    missing,
    raises,
    syntax_errors,
    torch_folder,
    try_install,
)
from shim_process import before_installing, in_own_process


def header_folders() -> Iterator[Path]:
    """Yield the installed torch's headers, and those of other releases that the test is given."""
    torch = torch_folder()
    if torch is not None:
        yield torch / "include"
    others = os.environ.get("VRAMX_TEST_TORCH_HEADERS")
    if others:
        yield from sorted(Path(others).glob("*/torch/include"))


@pytest.mark.parametrize("folder", list(header_folders()), ids=lambda path: path.parent.parent.name)
def test_compiles_without_a_warning(folder: Path) -> None:
    if missing():
        pytest.skip(f"cannot compile the shim: {missing()}")
    if folder.parent == torch_folder():
        libraries()  # which every test below needs; there, too, a warning is an error
    else:
        assert syntax_errors(folder) == ""


# --- installation --------------------------------------------------------------------------------


@before_installing
def test_install_makes_it_the_allocator_everywhere(bench: Bench) -> None:
    assert bench.shim.vramx_torch_is_installed() == 0
    installed(bench)
    assert bench.shim.vramx_torch_is_installed() == 1
    assert bench.name() == "vramx"
    assert bench.is_accelerator()


@before_installing
def test_built_for_names_the_torch_that_it_was_compiled_for(bench: Bench) -> None:
    torch = torch_folder()
    assert torch is not None
    version = bench.shim.vramx_torch_built_for().decode()
    assert f'__version__ = "{version}' in (torch / "version.py").read_text().replace("'", '"')


@in_own_process
def test_a_second_install_is_refused(bench: Bench) -> None:
    said = bench.install(bench.devices.handle_address)
    assert said == "vramx is already installed in this process"


@before_installing
def test_install_is_refused_once_torch_is_initialised(bench: Bench) -> None:
    bench.init(2)
    assert try_install(bench) == "torch's CUDA allocator is already initialised"
    assert bench.name() == "native"


@in_own_process
def test_install_refuses_a_core_of_another_version(bench: Bench) -> None:
    handle_address = bench.devices.handle_address
    handle = (ctypes.c_uint32 * 4).from_address(handle_address)  # version, layout, address
    assert all(handle[:3])
    for field in (0, 1):
        changed = (ctypes.c_uint32 * 4)(*handle)
        changed[field] += 1
        assert "different versions" in bench.install(ctypes.addressof(changed))


@before_installing
def test_install_is_refused_over_somebody_elses_allocator(bench: Bench) -> None:
    bench.rename_native("pluggable")
    assert "another CUDA allocator is installed" in try_install(bench)


@before_installing
def test_a_late_install_frees_older_tensors_through_torch(bench: Bench) -> None:
    bench.init(2)
    old = bench.native_allocate(MIB)
    assert try_install(bench, late=True) == ""
    assert bench.initialized()
    new = bench.allocate(2 * MIB)
    assert bench.stats(0)["allocated_bytes"][0][:2] == [3 * MIB, 3 * MIB]
    bench.journal()
    bench.free(old)
    bench.free(new)
    assert bench.journal() == ["delete"]
    assert bench.stats(0)["allocated_bytes"][0][0] == 0


@before_installing
def test_a_history_of_torchs_own_allocator_is_seen_once_that_is_initialised(bench: Bench) -> None:
    assert not bench.shim.vramx_torch_keeps_history()
    bench.init(2)
    assert not bench.shim.vramx_torch_keeps_history()
    bench.record_history(True, 100, 1, "")
    assert bench.shim.vramx_torch_keeps_history()


# --- allocations ---------------------------------------------------------------------------------


@in_own_process
def test_ordinary_requests_are_the_cores(bench: Bench) -> None:
    pointer = bench.allocate(1000)
    assert bench.devices.allocated(0) == 1024
    bench.free(pointer)
    assert bench.devices.allocated(0) == 0
    assert bench.journal() == []


@in_own_process
def test_requests_go_to_the_current_device(bench: Bench) -> None:
    bench.device(1)
    bench.allocate(MIB)
    bench.raw_alloc(MIB, SIDE_STREAM)
    assert bench.devices.started() == [1]
    assert bench.devices.allocated(1) == 2 * MIB


@in_own_process(visible=1)
def test_where_there_is_one_device_it_is_not_asked_for(bench: Bench) -> None:
    bench.device(1)  # what an answer would be
    bench.raw_alloc(MIB, STREAM)
    assert bench.devices.started() == [0]


@in_own_process
def test_a_request_of_nothing_starts_no_device(bench: Bench) -> None:
    assert bench.allocate(0) is None
    assert bench.raw_alloc(0, STREAM) is None
    bench.raw_delete(None)
    assert bench.devices.started() == []


@in_own_process
def test_raw_memory_is_the_cores_too(bench: Bench) -> None:
    pointer = bench.raw_alloc(MIB, SIDE_STREAM)
    assert bench.devices.allocated(0) == MIB
    bench.raw_delete(pointer)
    assert bench.devices.allocated(0) == 0


@in_own_process
def test_an_absurd_request_is_out_of_memory(bench: Bench) -> None:
    with raises("OutOfMemoryError: CUDA out of memory."):
        bench.allocate(1 << 63)


@in_own_process(count=1)
def test_a_device_that_the_core_cannot_serve_is_torchs(bench: Bench) -> None:
    bench.device(1)
    pointer = bench.allocate(512)
    bench.free(pointer)
    assert bench.journal() == ["allocate 512", "delete"]
    bench.device(0)
    bench.allocate(512)
    assert bench.devices.allocated(0) == 512


@in_own_process
def test_record_stream_reaches_whoever_has_the_memory(bench: Bench) -> None:
    ours = bench.allocate(MIB)
    bench.record_stream(ours, SIDE_STREAM)
    assert bench.journal() == []
    bench.begin_pool(0, POOL, STREAM)
    pooled = bench.allocate(MIB)
    bench.journal()
    bench.record_stream(pooled, SIDE_STREAM)
    assert bench.journal() == ["record stream"]
    assert bench.devices.check(0) == ""


@in_own_process
def test_caching_switched_off_leaves_everything_to_torch(bench: Bench) -> None:
    before = bench.allocate(512)
    bench.enable(False)
    assert bench.make_and_drop(512) == 1
    assert bench.journal() == ["allocate uncached", "delete uncached"]
    bench.free(before)
    assert bench.devices.allocated(0) == 0
    bench.enable(True)
    bench.allocate(512)
    assert bench.devices.allocated(0) == 512


@in_own_process
def test_pool_memory_freed_while_caching_is_off_is_still_cached_memory(bench: Bench) -> None:
    bench.begin_pool(0, POOL, STREAM)
    pointer = bench.allocate(512)
    bench.end_pool(0, POOL)
    bench.enable(False)
    bench.journal()
    bench.free(pointer)
    assert bench.journal() == ["delete"]


@before_installing
def test_torchs_switch_against_caching_is_obeyed(bench: Bench) -> None:
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    devices = installed(bench)
    bench.make_and_drop(512)
    assert devices.started() == []
    assert bench.journal() == ["allocate 512", "delete"]


@in_own_process
def test_a_forked_child_frees_nothing_and_gets_nothing(bench: Bench) -> None:
    bench.begin_pool(0, POOL, SIDE_STREAM)
    bench.record_history(True, 100, 3, "")
    pointer = bench.allocate(512)
    bench.journal()
    child = os.fork()
    if child == 0:
        bench.free(pointer)
        calls = bench.journal()
        bench.allocate(512)  # what torch's allocator says to it is torch's affair
        os._exit(0 if calls == [] and bench.journal() == ["allocate 512"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    bench.free(pointer)
    assert bench.devices.allocated(0) == 0


@before_installing
def test_a_child_forked_before_cuda_was_initialised_is_served(bench: Bench) -> None:
    assert try_install(bench) == ""
    child = os.fork()
    if child == 0:
        bench.init(2)
        pointer = bench.allocate(512)
        held = bench.devices.allocated(0)
        bench.free(pointer)
        os._exit(0 if [held, bench.devices.allocated(0), bench.journal()] == [512, 0, []] else 1)
    assert os.waitpid(child, 0)[1] == 0
    bench.init(2)
    bench.allocate(512)
    assert bench.devices.allocated(0) == 512


@before_installing
def test_a_child_forked_after_cuda_was_initialised_is_torchs_to_refuse(bench: Bench) -> None:
    installed(bench)
    child = os.fork()
    if child == 0:
        bench.allocate(512)
        os._exit(0 if bench.journal() == ["allocate 512"] else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(has_cuda_libraries(), reason="torch's own CUDA libraries would be loaded too")
@in_own_process(capacity_bytes=64 * MIB)
def test_torch_raises_its_out_of_memory_error(bench: Bench) -> None:
    import torch

    bench.serve_cpu_tensors()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 30, dtype=torch.uint8)
    (text,) = caught.value.args
    assert text.startswith("CUDA out of memory. Tried to allocate 1.00 GiB")
    assert "Exception raised from" not in text
