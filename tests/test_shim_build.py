"""The shim is built once, kept where nobody else can write, and its failures are told in full."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

from small_shim import installed_torch, toolbox, write_shim

from vramx.allocator import shim_build, shim_cache, toolchain
from vramx.allocator.shim import Shim
from vramx.allocator.torch_facts import read_torch
from vramx.config import Config
from vramx.errors import InstallError, ShimError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources of a small shim, in place of ours."""
    write_shim(tmp_path / "csrc", installed_torch().release)
    monkeypatch.setattr(toolchain, "find_sources", lambda: tmp_path / "csrc")
    return tmp_path / "csrc"


def counting_compiler(folder: Path, fails: bool = False) -> str:
    """A compiler that notes its calls, takes a moment, and compiles nothing."""
    script = folder / "cxx"
    end = "echo 'shim.cpp:1: error: no luck'; exit 1" if fails else ""
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "cxx 1"; exit; }\n'
        f'echo "$@" >> {folder}/calls\nsleep 0.1\n{end}\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def settings(csrc: Path, tmp_path: Path) -> Config:
    """What has the counting compiler build."""
    return toolbox(tmp_path, compiler=counting_compiler(tmp_path))


def calls_of(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


# --- building -------------------------------------------------------------------------------------


def test_a_shim_is_built_loaded_and_found_again(csrc: Path, tmp_path: Path) -> None:
    settings = toolbox(tmp_path)
    path = shim_build.ensure_shim(settings)
    written = path.stat().st_mtime_ns
    assert not Shim(path, installed_torch().version).is_installed()
    assert shim_build.ensure_shim(settings) == path
    assert path.stat().st_mtime_ns == written
    assert shim_build.shim_status(settings).built == path
    # Nothing of the build stays but the lock.
    assert {file.suffix for file in path.parent.iterdir()} == {".so", ".lock"}


def test_eight_that_come_together_build_once(settings: Config, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: shim_build.ensure_shim(settings), range(8)))
    assert len(paths) == 1
    assert calls_of(tmp_path) == 2  # one source compiled, one library linked


def test_a_change_of_source_header_or_compiler_makes_another_shim(
    settings: Config, csrc: Path
) -> None:
    names = {shim_build.ensure_shim(settings).name}
    for source in ("core/units.h", "torch/shim.cpp"):
        (csrc / source).write_text("// changed\n")
        names.add(shim_build.ensure_shim(settings).name)
    other = Path(settings.compiler)
    other.write_text(other.read_text().replace("cxx 1", "cxx 2"))
    names.add(shim_build.ensure_shim(settings).name)
    assert len(names) == 4


def test_a_holder_of_the_lock_is_waited_for(settings: Config, tmp_path: Path) -> None:
    first = shim_build.ensure_shim(settings)
    first.unlink()
    with open(f"{first}.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=shim_build.ensure_shim, args=(settings,))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        first.write_text("built by the holder")
        first.chmod(0o700)
    waiting.join(30)
    assert not waiting.is_alive()
    assert first.read_text() == "built by the holder"
    assert calls_of(tmp_path) == 2


def test_a_killed_build_leaves_nobody_waiting(settings: Config) -> None:
    path = shim_build.ensure_shim(settings)
    path.unlink()
    code = (
        "import fcntl, os, signal; f = open({!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code.format(f"{path}.lock")], check=False)
    assert shim_build.ensure_shim(settings) == path


def test_a_failed_build_shows_the_last_lines_and_keeps_the_log(csrc: Path, tmp_path: Path) -> None:
    settings = toolbox(tmp_path, compiler=counting_compiler(tmp_path, fails=True))
    with pytest.raises(ShimError, match=r"no luck") as caught:
        shim_build.ensure_shim(settings)
    log = next((tmp_path / "cache" / "shim").glob("*.log"))
    assert str(log) in str(caught.value)
    assert "-std=c++20" in log.read_text()  # the command, to be repeated by hand
    assert not [*log.parent.glob("*.so"), *log.parent.glob("*.build-*")]


def test_without_a_compiler_a_shim_that_was_brought_here_serves(
    settings: Config, tmp_path: Path
) -> None:
    path = shim_build.ensure_shim(settings)
    assert shim_build.ensure_shim(toolbox(tmp_path, compiler="no-such-c++")) == path


def test_without_a_compiler_the_way_out_is_named(csrc: Path, tmp_path: Path) -> None:
    settings = toolbox(tmp_path, compiler="no-such-c++")
    with pytest.raises(ShimError, match=r"'no-such-c\+\+' is not on the PATH.*apt-get.*strict="):
        shim_build.ensure_shim(settings)
    assert "not on the PATH" in shim_build.shim_status(settings).fault


# --- where it is kept -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        (Config(cache_dir=Path("/a"), xdg_cache_home=Path("/b")), "/a/shim"),
        (Config(xdg_cache_home=Path("/b")), "/b/vramx/shim"),
        (Config(), str(Path.home() / ".cache" / "vramx" / "shim")),
    ],
)
def test_folders_are_tried_in_this_order(settings: Config, first: str) -> None:
    folders = shim_cache.cache_folders(settings)
    assert str(folders[0]) == first
    assert folders[-1].parent.name == f"vramx-{os.geteuid()}"


def test_the_next_folder_is_used_where_the_first_cannot_be_made(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # a folder below a file: not even root can make it
    monkeypatch.setattr(shim_cache.tempfile, "tempdir", str(tmp_path))
    settings = toolbox(tmp_path, cache_dir=tmp_path / "file", compiler=counting_compiler(tmp_path))
    assert shim_build.ensure_shim(settings).parent == tmp_path / f"vramx-{os.geteuid()}" / "shim"


def test_no_folder_at_all_is_an_error_with_every_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ShimError, match=r"Not a directory.*; .*Not a directory.*VRAMX_CACHE_DIR"):
        shim_cache.writable_folder([tmp_path / "file" / "a" / "b", tmp_path / "file" / "c" / "d"])


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = shim_cache.writable_folder([tmp_path / "new" / "shim"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_others_could_have_written_is_not_trusted(settings: Config) -> None:
    path = shim_build.ensure_shim(settings)
    path.write_text("planted")
    path.chmod(0o777)
    assert "written by other users" in (shim_cache.distrust(path) or "")
    assert shim_build.ensure_shim(settings).read_text() == "made\n"
    path.parent.chmod(0o777)
    assert shim_cache.find(path.name, [path.parent]) is None


def test_a_link_and_another_users_file_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert "symbolic link" in (shim_cache.distrust(tmp_path / "link") or "")
    uid = (tmp_path / "file").stat().st_uid
    if uid == 0:
        os.chown(tmp_path / "file", 12345, -1)
    else:
        monkeypatch.setattr(shim_cache.os, "geteuid", lambda: uid + 1)
    assert "another user" in (shim_cache.distrust(tmp_path / "file") or "")


# --- loading --------------------------------------------------------------------------------------


def test_a_shim_for_another_torch_is_refused(csrc: Path, tmp_path: Path) -> None:
    path = shim_build.ensure_shim(toolbox(tmp_path))
    with pytest.raises(ShimError, match=r"is for torch .* and torch 2\.5\.0\+cu124 is running"):
        Shim(path, "2.5.0+cu124")


def test_a_damaged_shim_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shim.so"
    path.write_text("no library")
    with pytest.raises(ShimError, match=r"cannot be loaded: .*remove .*shim\.so"):
        Shim(path, "2.11.0")


# --- what it is built for and with ----------------------------------------------------------------


def test_the_installed_torch_is_read_without_importing_it() -> None:
    torch = pytest.importorskip("torch")
    facts = installed_torch()
    assert (facts.version, facts.cuda) == (torch.__version__, torch.version.cuda)
    assert facts.build == torch.version.git_version
    assert facts.cxx11_abi == torch._C._GLIBCXX_USE_CXX11_ABI


@pytest.mark.parametrize(
    ("symbol", "abi"),
    [(b"\0_ZN3c105ErrorC2ENS_14SourceLocationESs\0", False), (b"\0other\0", True)],
)
def test_the_abi_is_read_off_a_symbol_and_an_old_torch_refused(
    tmp_path: Path, symbol: bytes, abi: bool
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libc10.so").write_bytes(symbol)
    (tmp_path / "version.py").write_text("__version__ = '2.6.0+cu124'\ncuda: str = '12.4'\n")
    facts = read_torch(tmp_path)
    assert (facts.cxx11_abi, facts.cuda, facts.release) == (abi, "12.4", "2.6.0")
    (tmp_path / "version.py").write_text("__version__ = '2.5.1'\n")
    with pytest.raises(InstallError, match=r"torch 2\.5\.1 is too old"):
        read_torch(tmp_path)


def test_missing_cuda_headers_are_an_error_that_says_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "cuda_header_candidates", lambda *asked: [tmp_path])
    # The wheel of CUDA's runtime has this one, and lacks what it includes.
    (tmp_path / "cuda_runtime_api.h").touch()
    with pytest.raises(ShimError, match=rf"cuda_runtime_api\.h and .* in {tmp_path}.*triton"):
        toolchain.find_cuda_headers(installed_torch(), Config())


def test_headers_of_torchs_own_wheels_come_before_a_toolkit(tmp_path: Path) -> None:
    candidates = toolchain.cuda_header_candidates(installed_torch(), toolbox(tmp_path))
    toolkit = candidates.index(tmp_path / "cuda" / "include")
    wheel = next(n for n, path in enumerate(candidates) if "cuda_runtime" in path.parts)
    assert wheel < toolkit


def test_the_shim_links_neither_cudart_nor_libcuda() -> None:
    linked = [flag for flag in toolchain.link_flags(installed_torch()) if flag.startswith("-l")]
    assert set(linked) <= {"-lc10", "-lc10_cuda", "-ltorch_cuda"}
