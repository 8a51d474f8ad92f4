"""`vramx doctor` says of every kind of machine what will work on it, and never fails to."""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import pytest

from vramx.cli import doctor, doctor_facts
from vramx.cli.main import main

H200 = {
    "name": "NVIDIA H200",
    "total_bytes": 143771 << 20,
    "granularity_bytes": 2 << 20,
    "vmm_supported": True,
    "posix_handles": True,
    "fabric_handles": False,
    "compute_capability": "9.0",
    "mapping_ceiling": doctor_facts.MAPPING_CEILING,
}
COMPLETE: dict[str, Any] = {
    "vramx": {"version": "0.1.0", "core_error": ""},
    "python": "3.12.3",
    "system": "Linux x86_64",
    "cuda": {"error": "", "driver_version": 13000, "devices": [H200]},
    "torch": {"version": "2.11.0+cu130", "cuda": "13.0", "error": ""},
    "triton": "3.6.0",
    "compiler": "g++ 13.3.0",
    "python_headers": True,
    "allocator": {
        "obstacle": "",
        "entry_point": True,
        "shim_torch": "2.11.0+cu130",
        "shim_built": "/home/user/.cache/vramx/shim/vramx_torch-2.11.0+cu130-1-2.so",
        "shim_fault": "",
    },
    "packages": {"numpy": "2.4.6", "rich": "15.0.0", "matplotlib": "3.11.2", "plotly": "7.1.0"},
}
TURING = {**COMPLETE["cuda"], "devices": [{**H200, "name": "T4", "compute_capability": "7.5"}]}
NO_TORCH = {"version": None, "cuda": None, "error": "not installed"}
NO_GPU = {"error": "libcuda.so.1: cannot open shared object file", "driver_version": 0}


def allocator(**changes: Any) -> dict[str, Any]:
    """The fact about the allocator, with some of its values replaced."""
    return {"allocator": {**COMPLETE["allocator"], **changes}}


def machine(**changes: Any) -> dict[str, Any]:
    """A complete machine, with some facts replaced."""
    return {**copy.deepcopy(COMPLETE), **changes}


def finding(facts: dict[str, Any], part: str) -> doctor.Finding:
    return next(found for found in doctor.judge(facts) if found.part == part)


def test_everything_works_on_a_complete_machine() -> None:
    assert {found.state for found in doctor.judge(COMPLETE)} == {doctor.WORKS}


@pytest.mark.parametrize(
    ("part", "changes", "state", "said"),
    [
        ("replay", {"vramx": {"core_error": "boom"}}, doctor.MISSING, "core cannot be loaded"),
        ("replay", {"packages": {**COMPLETE["packages"], "rich": None}}, doctor.MISSING, "rich"),
        ("pictures", {"packages": {**COMPLETE["packages"], "plotly": None}}, doctor.LIMITED, "plo"),
        ("replay on a GPU", {"cuda": {**NO_GPU, "devices": []}}, doctor.MISSING, "no GPU: libcuda"),
        ("install_allocator", allocator(obstacle="no CUDA"), doctor.MISSING, "no CUDA"),
        ("install_allocator", allocator(shim_fault="no g++"), doctor.LIMITED, "plain mode"),
        ("install_allocator", allocator(shim_built=None), doctor.WORKS, "at the first use, once"),
        ("install_allocator", {}, doctor.WORKS, "the shim for torch 2.11.0+cu130 is built"),
        ("VRAMX=1 without vramx run", allocator(entry_point=False), doctor.MISSING, "pip install"),
        ("compressed activations", {"triton": None}, doctor.LIMITED, "triton is not installed"),
        ("compressed activations", {"triton": "3.2.0"}, doctor.LIMITED, "they need 3.3 or newer"),
        ("compressed activations", {"python_headers": False}, doctor.LIMITED, "no Python.h"),
        ("compressed activations", {"compiler": None}, doctor.LIMITED, "no C++ compiler"),
        ("compressed activations", {"cuda": {**NO_GPU, "devices": []}}, doctor.LIMITED, "no GPU"),
        ("compressed activations", {"cuda": TURING}, doctor.LIMITED, "capability is 7.5"),
        ("compressed activations", {"torch": NO_TORCH}, doctor.MISSING, "not installed"),
    ],
)
def test_a_fault_is_named(part: str, changes: dict[str, Any], state: str, said: str) -> None:
    found = finding(machine(**changes), part)
    assert found.state == state
    assert said in found.reason


def test_a_gpu_without_virtual_memory_is_no_usable_gpu() -> None:
    old = {**H200, "name": "old", "vmm_supported": False, "granularity_bytes": 0}
    cuda = {"error": "", "driver_version": 13000, "devices": [old]}
    assert finding(machine(cuda=cuda), "replay on a GPU").state == doctor.MISSING
    both = machine(cuda={**cuda, "devices": [H200, old]})
    assert finding(both, "replay on a GPU").reason.startswith("not on old")
    assert doctor.usable_gpus(both) == [H200]


def test_a_gpu_is_described_in_units_that_people_use() -> None:
    text = " ".join(" ".join(doctor.fact_lines(COMPLETE)).split())
    assert "CUDA 13.0" in text
    assert "NVIDIA H200, 140.40 GiB, compute capability 9.0" in text
    assert "chunks of 2 MiB, at most 520,192 mappings (1016 GiB at that size)" in text


def test_lines_fit_a_terminal() -> None:
    lines = [
        *doctor.fact_lines(COMPLETE),
        *doctor.finding_lines(doctor.judge(machine(triton=None))),
    ]
    assert max(len(line) for text in lines for line in text.splitlines()) <= 100


@pytest.mark.parametrize(
    ("devices", "required", "code"), [([], False, 0), ([], True, 1), ([H200], True, 0)]
)
def test_exit_code(
    monkeypatch: pytest.MonkeyPatch, devices: list[Any], required: bool, code: int
) -> None:
    facts = machine(cuda={"error": "", "driver_version": 0, "devices": devices})
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert doctor.run(argparse.Namespace(json=True, require_gpu=required)) == code


def test_json_describes_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert set(document["facts"]) == set(COMPLETE)
    assert {found["part"] for found in document["findings"]} == {
        found.part for found in doctor.judge(COMPLETE)
    }


def test_a_torch_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libtorch_cuda.so:\n undefined symbol")

    monkeypatch.setattr(doctor_facts.importlib, "import_module", broken)
    facts = doctor_facts.collect()
    assert facts["torch"]["error"] == "OSError: libtorch_cuda.so: undefined symbol"
    assert any("undefined symbol" in line for line in doctor.fact_lines(facts))


def test_what_it_says_the_kernels_need_is_what_they_need() -> None:
    keeping = pytest.importorskip("vramx.nn.keeping", exc_type=ImportError)
    from vramx.kernels import launch

    major, minor = launch._OLDEST_CAPABILITY
    assert (major + minor / 10, keeping.OLDEST_TRITON) == (
        doctor.OLDEST_CAPABILITY,
        doctor.OLDEST_TRITON,
    )
