"""`import torch` finds vramx in every process of a job, and is never the worse for it."""

from __future__ import annotations

import io
import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from child_processes import python

torch = pytest.importorskip("torch")

from fake_cuda import FakeCuda, fail_to_build, fail_with  # noqa: E402
from small_shim import build_shim  # noqa: E402

import vramx  # noqa: E402
from vramx import _autoload, config  # noqa: E402
from vramx.allocator import cuda_init, install  # noqa: E402
from vramx.cli import entry_folder  # noqa: E402
from vramx.config import Config  # noqa: E402
from vramx.errors import InvalidValueError, ShimError, VramxWarning  # noqa: E402

# In place of vramx: notes each call of the hook, and raises on request.
HOOK = """
import os
def _autoload():
    with open(os.environ["CALLS"], "a") as file:
        file.write(f"{os.getpid()} {os.environ.get('LOCAL_RANK', '-')}\\n")
"""
GIVEN_CUDA = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.cuda" and "torch._C" in sys.modules:
            native = sys.modules["torch._C"]
            if not hasattr(native, "_cuda_init"):
                native._cuda_init = lambda: None
sys.meta_path.insert(0, Finder())
"""
SPAWN = """
import multiprocessing, torch
def work():
    print("child", torch.__version__, flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shim: Path) -> FakeCuda:
    """A process of which VRAMX=1 asks for the allocator."""
    fake = FakeCuda(monkeypatch, tmp_path, shim)
    fake.configure(enabled=True)
    monkeypatch.setattr(config, "is_enabled", lambda: fake.settings.enabled)
    return fake


def test_the_allocator_is_installed_once_when_cuda_is_initialised_and_not_before(
    cuda: FakeCuda,
) -> None:
    for _ in range(3):
        _autoload._autoload()
    assert not vramx.allocator_installed()
    assert not cuda.opened
    cuda.initialise()
    assert vramx.allocator_installed()
    assert len(cuda.opened) == 1


def test_the_programs_own_call_comes_first(cuda: FakeCuda) -> None:
    _autoload._autoload()
    vramx.install_allocator(cross_stream="never")
    cuda.initialise()
    assert [devices.options["cross_stream"] for devices in cuda.opened] == ["never"]


@pytest.mark.parametrize(
    "name", ["_cuda_record_memory_history", "_cuda_attach_out_of_memory_observer"]
)
def test_what_initialises_cuda_in_cpp_finds_the_allocator_installed(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    installed_at_call = []

    def function(*args: object) -> tuple[object, ...]:
        installed_at_call.append(vramx.allocator_installed())
        return args

    cuda.configure(oom_snapshot=False)
    monkeypatch.setattr(torch._C, name, function, raising=False)
    _autoload._autoload()
    wrapper = getattr(torch._C, name)
    assert wrapper("all", 7) == ("all", 7)
    assert wrapper() == ()  # kept by somebody
    assert installed_at_call == [True, True]
    assert getattr(torch._C, name) is function
    assert cuda.initialised == 1
    assert __file__ in str(cuda_init.first_site())


def test_without_the_variable_nothing_is_changed(cuda: FakeCuda) -> None:
    cuda.configure(enabled=False)
    before = torch._C._cuda_init
    _autoload._autoload()
    assert torch._C._cuda_init is before
    cuda.initialise()
    assert not vramx.allocator_installed()
    assert cuda_init.first_site() is None


def test_a_forked_child_installs_for_itself(cuda: FakeCuda) -> None:
    _autoload._autoload()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            cuda.initialise()
            code = 0 if vramx.allocator_installed() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not vramx.allocator_installed()


def test_a_failure_is_one_warning_and_cuda_goes_on(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_build(monkeypatch, ShimError("no C++\ncompiler"))
    _autoload._autoload()
    with pytest.warns(VramxWarning, match=r"^the allocator is not .*: no C\+\+ compiler$") as told:
        cuda.initialise()
    assert len(told) == 1
    assert cuda.initialised == 1


@pytest.mark.filterwarnings("error")
def test_a_failure_is_told_where_warnings_are_errors(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, logged: io.StringIO
) -> None:
    fail_to_build(monkeypatch, ShimError("no compiler"))
    _autoload._autoload()
    cuda.initialise()
    assert cuda.initialised == 1
    assert "no compiler" in logged.getvalue()


def test_any_exception_stays_inside_the_hook(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = InvalidValueError("VRAMX_LIMIT='x'")
    monkeypatch.setattr(config, "config", lambda: fail_with(error))
    with pytest.warns(VramxWarning, match="VRAMX_LIMIT='x'"):
        _autoload._autoload()
    monkeypatch.setattr(cuda_init, "run_before", lambda _: 1 / 0)
    monkeypatch.setattr(config, "config", lambda: Config(enabled=True))
    with pytest.warns(VramxWarning, match="division by zero"):
        _autoload._autoload()


def test_plain_mode_is_only_for_those_who_allow_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(install, "install_allocator", lambda **given: asked.append(given))
    for strict in (True, False):
        monkeypatch.setattr(cuda_init, "_hook", cuda_init._Hook())
        monkeypatch.setattr(torch.cuda, "_initialized", False)
        cuda.configure(strict=strict)
        _autoload._autoload()
        cuda.initialise()
    assert [given["strict"] for given in asked] == [True, False]


@pytest.mark.parametrize(("value", "asks"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_variable_asks_unless_it_is_empty_or_zero(
    monkeypatch: pytest.MonkeyPatch, value: str | None, asks: bool
) -> None:
    monkeypatch.setattr(os, "environ", {} if value is None else {"VRAMX": value})
    assert config.is_enabled() is asks


# --- real processes -------------------------------------------------------------------------------


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for PYTHONPATH whose vramx notes the calls of its hook in tmp_path/calls."""
    package = tmp_path / "package" / "vramx"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_autoload.py").write_text(HOOK)
    monkeypatch.setattr(entry_folder, "_PACKAGE", package)
    return entry_folder.make(Config(cache_dir=tmp_path / "cache"))


def run(tmp_path: Path, path: str, *arguments: str, **variables: str) -> Any:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("VRAMX")}
    environment |= {"PYTHONPATH": path, "CALLS": str(tmp_path / "calls"), **variables}
    return python(*arguments, cwd=tmp_path, env=environment, timeout=240)


def calls_in(tmp_path: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in (tmp_path / "calls").read_text().splitlines())


@pytest.mark.slow
def test_a_program_and_its_spawned_child_are_hooked_once_each(tmp_path: Path, hook: Path) -> None:
    """Though they find the package twice: where it is installed, and on the path."""
    again = tmp_path / "site" / f"vramx-{vramx.__version__}.dist-info"
    again.mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        text = next(hook.glob("*.dist-info")).joinpath(name).read_text()
        (again / name).write_text(text)
    (tmp_path / "spawn.py").write_text(SPAWN)
    done = run(tmp_path, f"{hook}{os.pathsep}{again.parent}", "spawn.py")
    assert (done.returncode, done.stdout) == (0, f"child {torch.__version__}\n"), done.stderr
    assert sorted(calls_in(tmp_path).values()) == [1, 1]


@pytest.mark.slow
def test_workers_of_torchrun_are_hooked_once_each(tmp_path: Path, hook: Path) -> None:
    (tmp_path / "worker.py").write_text("import torch\n")
    done = run(
        tmp_path, str(hook), "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", "worker.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(calls_in(tmp_path).values()) == {1}
    ranks = {line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()}
    assert {"0", "1"} <= ranks


def test_a_bad_variable_is_one_line_and_the_import_of_torch_succeeds(tmp_path: Path) -> None:
    folder = entry_folder.make(Config(cache_dir=tmp_path / "cache"))
    code = "import torch; print(torch.ones(2).sum().item())"
    done = run(tmp_path, str(folder), "-c", code, VRAMX="1", VRAMX_DEVICES="x")
    assert (done.returncode, done.stdout) == (0, "2.0\n")
    assert len(done.stderr.splitlines()) == 1
    assert "the allocator is not installed, torch's own stays: VRAMX_DEVICES: 'x'" in done.stderr


@pytest.mark.parametrize("value", [None, "1"])
def test_only_a_process_that_asks_has_anything_changed(tmp_path: Path, value: str | None) -> None:
    """As it is after `pip install`: every import of torch finds the entry point."""
    folder = entry_folder.make(Config(cache_dir=tmp_path / "cache"))
    code = (
        "import sys, torch; print('vramx._autoload' in sys.modules,"
        " 'vramx.allocator.cuda_init' in sys.modules,"
        # A wrapper is Python's; torch's own is, too, in a build without CUDA.
        " 'cuda_init' in str(getattr(torch._C._cuda_init, '__code__', '')))"
    )
    # A torch without CUDA has no initialisation to wrap: it is given one.
    setup = tmp_path / "site" / "sitecustomize.py"
    setup.parent.mkdir()
    setup.write_text(GIVEN_CUDA)
    path = f"{folder}{os.pathsep}{setup.parent}"
    variables = {} if value is None else {"VRAMX": value}
    done = run(tmp_path, path, "-c", code, **variables)
    assert done.stdout.split() == [str(value == "1")] * 3, done.stderr


@pytest.mark.parametrize("is_installed", [False, True])
def test_importing_vramx_beside_torch_starts_the_watch(tmp_path: Path, is_installed: bool) -> None:
    code = (
        "import torch; torch._C._cuda_init = lambda: None; import vramx;"
        "from vramx.allocator import cuda_init; torch._C._cuda_init(); print(cuda_init._hook.site)"
    )
    path = Path(vramx.__file__).parent.parent
    if is_installed:
        path = entry_folder.make(Config(cache_dir=tmp_path / "cache"))
    done = run(tmp_path, str(path), "-c", code)
    assert done.stdout == "<string>:1 (<module>)\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import vramx.errors", "import vramx"])
def test_what_a_program_imported_before_torch_stays(tmp_path: Path, first: str) -> None:
    folder = entry_folder.make(Config(cache_dir=tmp_path / "cache"))
    code = f"import sys; {first}; was = sys.modules['vramx.errors']; import torch, vramx;"
    code += "print(was is sys.modules['vramx.errors'], 'vramx._autoload' in sys.modules)"
    assert run(tmp_path, str(folder), "-c", code).stdout == "True True\n"
