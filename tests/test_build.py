"""The build does what is needed and no more, says in one line what is missing, and packs all."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from child_processes import python

import vramx
from vramx.allocator import shim_build, toolchain

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).resolve().parent.parent
# A project whose module needs no pybind11, so that a build takes a fraction of a second.
PROJECT = """
[project]
name = "vramx"
version = "0"
[tool.setuptools]
packages = ["vramx"]
"""
BINDINGS = """
#include <Python.h>
#include "core/answer.h"
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", nullptr, -1, nullptr,
                             nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__core() {
  PyObject* created = PyModule_Create(&module);
  PyModule_AddIntConstant(created, "answer", kAnswer);
  return created;
}
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup() -> ModuleType:
    return load(ROOT / "setup.py")


@pytest.fixture
def environment() -> ModuleType:
    return load(ROOT / ".ci" / "environment.py")


@pytest.fixture
def small_checkout(tmp_path: Path) -> Path:
    """A project of one header and one source, built by this repository's setup.py."""
    shutil.copyfile(ROOT / "setup.py", tmp_path / "setup.py")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "vramx").mkdir()
    (tmp_path / "vramx" / "__init__.py").touch()
    (tmp_path / "csrc" / "core").mkdir(parents=True)
    (tmp_path / "csrc" / "core" / "answer.h").write_text("constexpr int kAnswer = 41;\n")
    (tmp_path / "csrc" / "core" / "other.cpp").write_text("int other() { return 0; }\n")
    (tmp_path / "csrc" / "bindings.cpp").write_text(BINDINGS)
    return tmp_path


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VRAMX_WERROR": "0", **variables}
    return python("setup.py", "--quiet", "build_ext", "--inplace", cwd=folder, env=environment)


def answer(folder: Path) -> str:
    command = [sys.executable, "-c", "import vramx._core as core; print(core.answer)"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.slow
def test_a_changed_header_rebuilds_what_includes_it_and_nothing_else(small_checkout: Path) -> None:
    first = build(small_checkout)
    assert first.returncode == 0, first.stderr
    assert answer(small_checkout) == "41"
    assert "no work to do" in build(small_checkout).stdout
    (small_checkout / "csrc" / "core" / "answer.h").write_text("constexpr int kAnswer = 42;\n")
    again = build(small_checkout)
    assert "/bindings.cpp" in again.stdout
    assert "/layers.cpp" in first.stdout
    assert "/layers.cpp" not in again.stdout
    assert answer(small_checkout) == "42"


def test_warnings_are_errors_only_on_request(small_checkout: Path) -> None:
    (small_checkout / "csrc" / "core" / "other.cpp").write_text(
        "static int unused() { return 0; }\n"
    )
    assert build(small_checkout).returncode == 0
    strict = build(small_checkout, VRAMX_WERROR="1")
    assert strict.returncode != 0
    assert "unused" in strict.stdout


def test_a_missing_compiler_is_named_in_one_line(small_checkout: Path) -> None:
    done = build(small_checkout, CXX="no-such-compiler")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "no C++ compiler: 'no-such-compiler'" in last
    assert "apt-get install g++" in last


def test_a_setuptools_older_than_asked_for_is_named_in_one_line(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f'"setuptools>={setup.LEAST_SETUPTOOLS}"' in (ROOT / "pyproject.toml").read_text()
    setup.check_setuptools()
    monkeypatch.setattr(setup.setuptools, "__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"^setuptools 65\.5\.0 is too old: .*'setuptools>=77'$"):
        setup.check_setuptools()


def test_missing_headers_of_python_are_named_in_one_line(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(setup.PlatformError, match=r"no Python\.h in .*apt-get install python3-dev"):
        setup.python_include()


def test_each_missing_tool_is_named_in_a_line(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert not environment.lacks_tools(sys.executable, "ensurepip")
    assert not capsys.readouterr().err
    bare = tmp_path / "python3"  # as Debian's without python3-dev and python3-venv
    bare.write_text("#!/bin/sh\necho Python.h; echo ensurepip\n")
    bare.chmod(0o755)
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    assert environment.lacks_tools(str(bare), "ensurepip")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("apt-get install ")[1].split()[0] for line in lines] == [
        "g++",
        "python3-dev",
        "python3-venv",
    ]


def test_the_shim_for_torch_is_not_part_of_the_core(setup: ModuleType) -> None:
    sources = setup.core_sources()
    assert "csrc/driver/cuda_driver.cpp" in sources
    assert not [source for source in sources if source.startswith("csrc/torch")]


def test_pybind11_headers_of_torch_serve_where_the_package_is_missing(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    monkeypatch.setattr(
        setup.importlib.util, "find_spec", lambda n: None if n == "pybind11" else find_spec(n)
    )
    include = Path(setup.pybind11_include())
    assert include.parent.name == "torch"
    assert (include / "pybind11" / "pybind11.h").exists()


def test_paths_are_written_as_ninja_reads_them(setup: ModuleType) -> None:
    assert setup.ninja_path("a b/$c:d") == "a$ b/$$c$:d"


def test_every_package_has_one_pin_for_each_python(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for group in environment.GROUPS.values() for name in group]
    for version in ((3, 10), (3, 11), (3, 13)):
        monkeypatch.setattr(sys, "version_info", version)
        for name in names:
            assert environment.pin(name).startswith(f"{name}==")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_what_pyproject_names_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    pins = (ROOT / "constraints.txt").read_text()
    for requirement in wanted:
        name, _, version = requirement.split(";")[0].split(">")[0].partition("==")
        assert f"\n{name}=={version}" in pins


def test_an_active_python_with_torch_gets_only_what_it_lacks(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(environment, "is_installed", lambda name: name != "rich")
    monkeypatch.setattr(environment, "install", lambda python, words: asked.append(words) or True)
    assert environment.complete_active(["torch", "numpy", "rich"]) == 0
    assert asked == [[environment.pin("rich")]]
    assert capsys.readouterr().out.strip() == sys.executable


@pytest.mark.parametrize(("lacking", "code"), [("rich", 0), ("pytest", 1)])
def test_without_a_network_only_the_essential_stops_it(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, lacking: str, code: int
) -> None:
    monkeypatch.setattr(environment, "is_installed", lambda name: name != lacking)
    monkeypatch.setattr(environment, "install", lambda python, words: False)
    assert environment.complete_active(["torch", "rich", "pytest"]) == code


def test_a_venv_is_brought_up_to_the_pins_once(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(environment, "VENV", tmp_path)
    monkeypatch.setattr(environment, "PINS", tmp_path / "pins")
    monkeypatch.setattr(environment, "install", lambda python, words: asked.append(words) or True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "pins").write_text("a==1\n")
    for names in (["a"], ["a"], ["a", "b"], ["a"]):
        assert environment.complete_venv(names) == 0
    assert [words[2:] for words in asked] == [["a"], ["a", "b"]]
    (tmp_path / "pins").write_text("a==2\n")
    environment.complete_venv(["a"])
    assert len(asked) == 3


# --- the package ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel would hold, but for the compiled core."""
    folder = tmp_path_factory.mktemp("packed")
    # Beside the checkout's own build folder, which another test may be using.
    beside = ["build_py", "--build-lib", str(folder), "egg_info", "--egg-base", str(folder)]
    done = python("setup.py", "--quiet", *beside, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_sources_of_the_shim_travel_in_the_wheel(packed: Path) -> None:
    ours = ROOT / "csrc"
    wanted = {
        path.relative_to(ours)
        for pattern in shim_build.SOURCE_PATTERNS
        for path in ours.glob(pattern)
    }
    found = packed / "vramx" / "csrc"
    assert wanted == {path.relative_to(found) for path in found.rglob("*") if path.is_file()}
    assert Path("process/allocators.h") in wanted


def test_the_entry_point_and_the_modules_version_travel_in_the_wheel(packed: Path) -> None:
    (about,) = packed.glob("*.egg-info")
    entry_points = (about / "entry_points.txt").read_text()
    assert "[torch.backends]\nvramx = vramx._autoload:_autoload" in entry_points
    assert f"\nVersion: {vramx.__version__}\n" in (about / "PKG-INFO").read_text()


def test_a_package_that_came_in_a_wheel_finds_its_sources(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (ROOT / "csrc" / "torch").is_dir():
        pytest.skip("this checkout has no shim")
    monkeypatch.setattr(toolchain, "_PACKAGE", packed / "vramx")
    assert toolchain.find_sources() == packed / "vramx" / "csrc"
