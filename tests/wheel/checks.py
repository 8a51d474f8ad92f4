"""What an installed vramx has and does where there is no checkout; run by .ci/wheel.py.

Not collected by `make test`: it must run in an environment that the wheel was installed into, with
the folder of the sources that it was built from in VRAMX_SOURCES: the unpacked sdist, or a checkout
for cibuildwheel. What needs a package that is not there is skipped.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vramx

PACKAGE = Path(vramx.__file__).resolve().parent
HERE = Path(__file__).resolve().parent
SOURCES = Path(os.environ["VRAMX_SOURCES"])
TRACE = PACKAGE / "demo" / "unet3d_patch.npz"
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def python(*words: object, **variables: str) -> str:
    """Run this Python in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def program(name: str) -> Path:
    """Return the program that the wheel installed beside this Python."""
    return Path(sys.executable).parent / name


# -- What is in it ---------------------------------------------------------------------------------


def test_it_is_the_installed_package_that_is_imported() -> None:
    assert PACKAGE.parent.name == "site-packages"
    assert importlib.util.find_spec("vramx._core").origin.startswith(str(PACKAGE))


def test_the_version_is_one_wherever_it_is_asked_for() -> None:
    assert importlib.metadata.version("vramx") == vramx.__version__
    assert subprocess.check_output([program("vramx"), "--version"], text=True).split() == [
        "vramx",
        vramx.__version__,
    ]


def test_every_file_of_the_package_is_in_the_wheel_and_nothing_else() -> None:
    names = [str(path) for path in importlib.metadata.files("vramx") or []]
    tops = {name.split("/")[0] for name in names if not name.startswith("..")}
    assert tops == {"vramx", f"vramx-{vramx.__version__}.dist-info"}
    source = SOURCES / "vramx"
    wanted = {
        path.relative_to(SOURCES).as_posix()
        for path in source.rglob("*")
        if path.suffix in {".py", ".pyi", ".npz"} or path.name == "py.typed"
    }
    assert {"vramx/py.typed", "vramx/_core.pyi", "vramx/demo/llama_varlen.npz"} <= wanted
    rest = {name for name in names if name.startswith("vramx/")} - wanted
    extra = {name for name in rest if not name.startswith("vramx/csrc/") and ".pyc" not in name}
    assert wanted <= set(names)
    assert [re.sub(r"\..*", "", name) for name in extra] == ["vramx/_core"]


def test_the_shim_has_every_source_and_header_that_it_includes() -> None:
    csrc = PACKAGE / "csrc"
    sources = [*csrc.rglob("*.cpp"), *csrc.rglob("*.h")]
    assert csrc / "torch" / "shim.cpp" in sources
    for source in sources:
        text = source.read_text()
        assert text == (SOURCES / source.relative_to(PACKAGE)).read_text()
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            assert (csrc / name).is_file(), f"{source.name} includes {name}"


@pytest.mark.skipif(not (SOURCES / "PKG-INFO").is_file(), reason="the sources are a checkout")
def test_the_sdist_has_what_the_tests_and_the_build_need() -> None:
    assert SOURCES.name == f"vramx-{vramx.__version__}"
    for name in ("setup.py", "Makefile", "constraints.txt", ".ci/run", "tests/conftest.py"):
        assert (SOURCES / name).is_file()
    assert (SOURCES / "benchmarks" / "harness.py").is_file()
    assert not [*SOURCES.rglob("*.so"), *SOURCES.rglob("*.pyc")]


# -- What it does ----------------------------------------------------------------------------------


def test_importing_it_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, vramx; print([n for n in ('torch', 'numpy', 'triton') if n in sys.modules])"
    assert python("-c", code).strip() == "[]"


@needs_torch
def test_every_public_name_is_there() -> None:
    for name in vramx.__all__:
        assert getattr(vramx, name) is not None


def test_doctor_finds_the_core_and_the_entry_point() -> None:
    found = json.loads(python("-m", "vramx", "doctor", "--json"))
    assert found["facts"]["vramx"] == {"version": vramx.__version__, "core_error": ""}
    assert found["facts"]["allocator"]["entry_point"]
    states = {each["part"]: each["state"] for each in found["findings"]}
    assert states["replay"] == states["VRAMX=1 without vramx run"] == "works"


def test_replay_runs_the_core_on_a_trace_of_the_package() -> None:
    document = json.loads(python("-m", "vramx", "replay", TRACE, "--json"))
    (trace,) = document["traces"]
    ours, native = trace["policies"]["vramx"], trace["policies"]["native"]
    assert trace["peak_live_bytes"] <= ours["peak_reserved_bytes"] < native["peak_reserved_bytes"]


def test_the_demo_runs_anywhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [program("vramx"), "demo"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "llama_varlen" in done.stdout
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["vramx-demo.png"] * drawn


@needs_torch
@pytest.mark.parametrize("value", ["0", "1"])
def test_import_torch_finds_it_and_only_a_process_that_asks_is_changed(value: str) -> None:
    code = (
        "import sys, torch;"
        "print(*(n in sys.modules for n in ('vramx._autoload', 'vramx.allocator.cuda_init')))"
    )
    asked = str(value == "1")
    assert python("-c", code, VRAMX=value).split() == [asked, asked]


@needs_torch
def test_compression_trains_with_it() -> None:
    code = (
        "import torch, vramx\n"
        "model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())\n"
        "with vramx.compress(min_bytes=0) as stats:\n"
        "    loss = model(torch.randn(64, 256)).square().sum()\n"
        "loss.backward(); print(stats.kept_bytes < stats.saved_bytes)"
    )
    assert python("-c", code).strip() == "True"


def test_pytest_knows_the_marks(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.vram_limit('2GiB')\ndef test_one(): pass\n"
    (tmp_path / "test_marked.py").write_text(test)
    words = ("-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", tmp_path)
    assert re.search(r"1 (passed|skipped)", python(*words))


# -- Its types -------------------------------------------------------------------------------------


@needs_torch
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_users_program_has_the_types_that_it_says(tmp_path: Path) -> None:
    words = ["-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", tmp_path]
    assert python(*words, HERE / "typed_program.py") == ""


@needs_torch
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_wrong_call_is_a_type_error(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import vramx\nvramx.install_allocator(limitt='1GiB')\nvramx.optimise\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path, wrong],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.findall(r"\[([\w-]+)\]", done.stdout) == ["call-arg", "attr-defined"]
