"""Kernels as they are compiled for an H100 or H200 (sm_90), without one.

Instructions an element decide whether memory is the limit. At 4.3 TB/s an H200 has time for 7.8
instructions an element and byte that is moved: its 132 x 4 schedulers at 1.98 GHz serve 32 lanes
each. Counted are those of a whole tile: in the machine code it lies before the first EXIT that has
no condition; the short tile and the division's slow path lie behind. The counts are those of the
compiler that is installed.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from vramx.kernels import launch

SM_90 = (90, 32)
# Triton's own: what a kernel compiled to in the run before, if neither has changed.
CACHE = Path(__file__).resolve().parent.parent / "build" / "triton"
# Of a program: what capability 8.6, 8.9 and 12.0 have. An H100 would run twice as much.
MOST_SHARED_BYTES = 99 << 10


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel: the operations of a whole tile, all of them, and of how many elements."""

    tile: Counter[str]
    everything: Counter[str]
    elements: int  # of one thread
    loop: Counter[str] = field(default_factory=Counter)  # the longest one

    def bytes_of(self, operation: str) -> int:
        """The bytes of a thread that go through operations of 16 bytes with this name."""
        return 16 * self.tile[f"{operation}.E.128"]

    @property
    def per_element(self) -> float:
        return self.tile.total() / self.elements

    @property
    def of_local_memory(self) -> list[str]:
        return [op for op in self.everything if op.split(".")[0] in ("LDL", "STL")]


@lru_cache
def folder() -> Path:
    """A place of this process's own for machine code; skip where nothing can be compiled."""
    triton = pytest.importorskip("triton")
    if not isinstance(launch.mask_plan(packs=True).kernel, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing compiles in this process")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        pytest.skip("triton before 3.3 describes what it compiles in another way")
    place = tempfile.TemporaryDirectory()
    atexit.register(place.cleanup)
    return Path(place.name)


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], elements: int,
    aligned: Callable[[str, str], bool] = lambda name, kind: kind[0] == "*",
) -> MachineCode:  # fmt: skip
    """Compile a kernel whose arguments are of `types` or in `constants`, `elements` a thread."""
    folder()  # skips where nothing can be compiled
    import triton

    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    known = {place[name]: value for name, value in constants.items() if name in place}
    signature = {n: "constexpr" if place[n] in known else types[n] for n in kernel.arg_names}
    multiples = [n for n, kind in signature.items() if aligned(n, kind)]
    source = triton.compiler.ASTSource(
        kernel, signature, known, {place[n]: [["tt.divisibility", 16]] for n in multiples}
    )
    with patch.dict(os.environ, {"TRITON_CACHE_DIR": str(CACHE)}):
        binary = triton.compile(
            source,
            target=triton.backends.compiler.GPUTarget("cuda", *SM_90),
            options={name: constants.get(name) for name in ("num_warps", "maxnreg")},
        )
    assert binary.metadata.shared <= MOST_SHARED_BYTES
    return parse(disassembled(binary.asm["cubin"]), elements)


@lru_cache
def disassembled(cubin: bytes) -> str:
    file = folder() / "kernel.cubin"
    file.write_bytes(cubin)
    command = [find_disassembler(), "-c", "-ndf", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def parse(text: str, elements: int) -> MachineCode:
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)
    operations = [name for _, name in found if name != "NOP"]
    ends = (i for i, (condition, name) in enumerate(found) if name == "EXIT" and not condition)
    end = next(ends, len(found))
    tile = [name for _, name in found[: end + 1] if name != "NOP"]
    return MachineCode(Counter(tile), Counter(operations), elements, Counter(longest_loop(text)))


def longest_loop(text: str) -> list[str]:
    """Return the operations from a label to the branch back to it, where those are the most."""
    begins: dict[str, int] = {}
    operations: list[str] = []
    loop: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            begins[label[1]] = len(operations)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            operations.append(found[1])
            target = re.search(r"\.L_x_\d+", found[2]) if found[1].startswith("BRA") else None
            begin = begins.get(target[0]) if target else None
            if begin is not None and len(operations) - begin > len(loop):
                loop = operations[begin:]
    return loop


def find_disassembler() -> str:
    """Triton brings its own; one of a CUDA toolkit does as well."""
    import triton

    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    found = str(own) if own.exists() else shutil.which("nvdisasm")
    if found is None:
        pytest.skip("no nvdisasm: neither in triton nor on the path")
    return found
