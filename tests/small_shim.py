"""A shim of twenty lines instead of torch's interface, compiled and loaded as the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vramx.allocator import shim_build, toolchain
from vramx.allocator.torch_facts import TorchFacts, read_torch
from vramx.config import Config

SHIM = """
#include <cstdio>
#define EXPORT extern "C" __attribute__((visibility("default")))
namespace { int installed = 0; char last[128] = ""; }
EXPORT const char* vramx_torch_built_for() { return BUILT_FOR; }
EXPORT int vramx_test_profilers = 0;
EXPORT void vramx_torch_note_profiler() { ++vramx_test_profilers; }
EXPORT int vramx_torch_install(const void* core, int is_late) {
  installed = core != nullptr;
  vramx_test_profilers = 0;
  std::snprintf(last, sizeof last, "no core, late %d", is_late);
  return !installed;
}
EXPORT const char* vramx_torch_error() { return last; }
EXPORT unsigned long long vramx_test_limit[8] = {};
EXPORT void vramx_torch_set_limit(int device, unsigned long long bytes) {
  vramx_test_limit[device + 1] = bytes;
}
EXPORT int vramx_torch_is_installed() { return installed; }
EXPORT int vramx_torch_keeps_history() { return 0; }
"""


def write_shim(csrc: Path, built_for: str) -> Path:
    """Write the sources of a small shim as a csrc folder, and return the source."""
    (csrc / "torch").mkdir(parents=True, exist_ok=True)
    (csrc / "core").mkdir(exist_ok=True)
    source = csrc / "torch" / "shim.cpp"
    source.write_text(SHIM.replace("BUILT_FOR", f'"{built_for}"'))
    return source


def build_shim(folder: Path) -> Path:
    """Compile the small shim for the installed torch."""
    write_shim(folder / "csrc", torch.__version__.split("+")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "find_sources", lambda: folder / "csrc")
        return shim_build.ensure_shim(toolbox(folder))


def installed_torch() -> TorchFacts:
    return read_torch(Path(torch.__file__).parent)


def toolbox(tmp_path: Path, **changes: Any) -> Config:
    """A configuration whose cache and CUDA headers lie in a temporary folder."""
    include = tmp_path / "cuda" / "include"
    for header in toolchain.CUDA_HEADERS:
        (include / header).parent.mkdir(parents=True, exist_ok=True)
        (include / header).touch()
    defaults: dict[str, Any] = {"cache_dir": tmp_path / "cache", "cuda_home": tmp_path / "cuda"}
    return Config(**{**defaults, **changes})
