"""vramx in a C++ program: csrc/library installs the allocator, and the example for LibTorch builds.

The first program is linked with the shim and the core, and with tests/torch_stub in the place of
the CUDA that a torch for processors lacks. The example is built as its CMakeLists.txt says.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from native_build import core_archive
from shim_build import CSRC, ROOT, libraries, missing, torch_folder

PROGRAM = r"""
#include <vramx.h>

#include <cstdio>
#include <exception>

extern "C" void bench_start();
extern "C" void bench_init(int count);
extern "C" const char* bench_name();
extern "C" double bench_fraction(int device);
extern "C" void* bench_allocate(std::size_t size);

int main() {
  bench_start();
  std::printf("%s %d\n", bench_name(), vramx::allocator_installed());
  vramx::install_allocator(std::uint64_t{1} << 29);
  std::printf("%s %d\n", bench_name(), vramx::allocator_installed());
  bench_init(1);
  std::printf("%g\n", bench_fraction(0));
  std::printf("%d\n", bench_allocate(1 << 20) != nullptr);
  try {
    vramx::install_allocator();
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
}
"""
LIMIT_S = 300


def run(*command: object) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"cannot compile the shim: {missing()}")
def test_a_program_without_python_installs_the_allocator(tmp_path: Path) -> None:
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    stub, shim = libraries()
    torch = torch_folder()
    assert torch is not None
    run(
        *("g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{CSRC / 'library'}"),
        *(source, CSRC / "library" / "vramx.cpp", "-o", program),
        *(shim, stub, core_archive(), f"-L{torch / 'lib'}", "-lc10", "-pthread", "-ldl"),
        *(f"-Wl,-rpath,{torch / 'lib'}", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"),
    )
    native, installed, fraction, served, again = run(program).splitlines()
    assert native == "native 0"
    assert installed == "vramx 1"
    assert 0 < float(fraction) < 1  # of the stand-in's device
    assert served == "1"
    assert again == "vramx: vramx is already installed in this process"


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("make") and torch_folder()),
    reason="needs CMake, make and torch",
)
def test_the_example_builds_with_cmake_and_trains(tmp_path: Path) -> None:
    torch = torch_folder()
    assert torch is not None
    if (torch / "lib" / "libtorch_cuda.so").exists():
        pytest.skip("CMake asks for a CUDA toolkit there; tests/gpu builds it without")
    source, folder = ROOT / "examples" / "libtorch", tmp_path / "build"
    run("cmake", "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={torch / 'share' / 'cmake'}")
    run("cmake", "--build", folder)
    said = run(folder / "train", "--steps", "3").splitlines()
    assert [line.split(":")[0] for line in said[:3]] == ["step 0", "step 1", "step 2"]
    assert said[3:] == ["no CUDA memory was used"]
