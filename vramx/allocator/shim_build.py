"""The shim, compiled for the installed torch when it is first needed.

torch's allocator interface changes with nearly every minor release, so there is one binary for each
torch, compiler and state of our sources, and a key made of all of them in its name. A build takes
some ten seconds, once; afterwards it is one hash over our sources and a look for the file. Eight
processes that start together build once (see shim_cache). Needs neither torch imported nor a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vramx.allocator import shim_cache, toolchain
from vramx.allocator.toolchain import Compiler
from vramx.allocator.torch_facts import TorchFacts, find_torch
from vramx.config import Config
from vramx.errors import ShimError
from vramx.progress import ProgressBar

# What the shim may include of ours, and so what a change of makes another shim.
SOURCE_PATTERNS = ("core/*.h", "process/allocators.h", "torch/*.h", "torch/*.cpp")
_COMMAND_LIMIT_S = 900.0
_LAST_LINES = 12


@dataclass(frozen=True)
class ShimStatus:
    """What is known of the shim without building it."""

    torch: str | None
    built: Path | None
    fault: str  # why it cannot be built here; empty if it can


@dataclass(frozen=True)
class _Plan:
    """Everything that decides what a build makes. Equal plans make the same file."""

    torch: TorchFacts
    csrc: Path
    sources_hash: str

    @property
    def prefix(self) -> str:
        """What the file's name starts with, whichever compiler makes it."""
        facts = [self.torch.version, self.torch.cuda, self.torch.build, self.torch.cxx11_abi]
        key = hashlib.sha256(repr([*facts, self.sources_hash]).encode()).hexdigest()[:16]
        return f"vramx_torch-{self.torch.version}-{key}"

    def name(self, compiler: Compiler, flags: list[str]) -> str:
        # Where torch and the headers lie is left out: two environments with one torch share a shim.
        flags = [*flags, *toolchain.link_flags(self.torch)]
        relevant = [flag for flag in flags if not flag.startswith(("-I", "-L", "-isystem", "/"))]
        made = repr([compiler.command, compiler.version, relevant])
        return f"{self.prefix}-{hashlib.sha256(made.encode()).hexdigest()[:8]}.so"


def ensure_shim(config: Config) -> Path:
    """Return the shim for the installed torch, and build it first if need be.

    Raises:
        InstallError: torch is missing or too old.
        ShimError: it cannot be built; the text has the reason and the way out.
    """
    plan = _plan(find_torch())
    folders = shim_cache.cache_folders(config)
    try:
        compiler = toolchain.find_compiler(config)
    except ShimError:
        # Built elsewhere and brought here, as on the nodes of a cluster that have no compiler.
        if (made_before := _find_any(plan, folders)) is not None:
            return made_before
        raise
    name = plan.name(compiler, toolchain.compile_flags(plan.torch, plan.csrc, Path()))
    if (found := shim_cache.find(name, folders)) is not None:
        return found
    headers = toolchain.find_cuda_headers(plan.torch, config)
    folder = shim_cache.writable_folder(folders)
    target = folder / name
    with shim_cache.lock(folder / f"{name}.lock"):
        if shim_cache.find(name, [folder]) is None:  # else somebody built it while this one waited
            _build(plan, compiler, headers, target)
    return target


def shim_status(config: Config) -> ShimStatus:
    """Return whether there is a shim for the installed torch, and if not whether one can be."""
    version = None
    try:
        plan = _plan(find_torch())
        version = plan.torch.version
        built = _find_any(plan, shim_cache.cache_folders(config))
        if built is None:
            toolchain.find_compiler(config)
            toolchain.find_cuda_headers(plan.torch, config)
    except Exception as error:  # whatever is wrong with this machine is the answer
        return ShimStatus(version, None, " ".join(str(error).split()))
    return ShimStatus(version, built, "")


def _plan(torch: TorchFacts) -> _Plan:
    csrc = toolchain.find_sources()
    return _Plan(torch, csrc, _hash_of(csrc))


def _hash_of(csrc: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCE_PATTERNS for path in csrc.glob(pattern)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(csrc)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _find_any(plan: _Plan, folders: list[Path]) -> Path | None:
    """Return a shim that fits, whichever compiler made it."""
    for folder in folders:
        with contextlib.suppress(OSError):
            for path in sorted(folder.glob(f"{plan.prefix}-*.so")):
                if found := shim_cache.find(path.name, [folder]):
                    return found
    return None


def _build(plan: _Plan, compiler: Compiler, headers: Path, target: Path) -> None:
    """Build under another name; the file takes its own when it is complete."""
    _remove_leftovers(target)
    work = Path(tempfile.mkdtemp(prefix=f"{target.stem}.build-", dir=target.parent))
    try:
        objects = _compile(plan, compiler, headers, work, target)
        linked = work / "shim.so"
        link = [*compiler.command, *map(str, objects), "-o", str(linked)]
        _run_all([[*link, *toolchain.link_flags(plan.torch)]], _log_path(target))
        linked.chmod(0o700)  # a linker's file is as open as the umask has it
        os.replace(linked, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Remove the folders of builds that were killed. The caller holds the lock: none is alive.

    Where locks do not work one may be; a young folder is left alone for that.
    """
    oldest_s = time.time() - 2 * _COMMAND_LIMIT_S
    for folder in target.parent.glob(f"{target.stem}.build-*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < oldest_s:
                shutil.rmtree(folder, ignore_errors=True)


def _compile(
    plan: _Plan, compiler: Compiler, headers: Path, work: Path, target: Path
) -> list[Path]:
    """Compile each source, side by side, and return the objects."""
    flags = toolchain.compile_flags(plan.torch, plan.csrc, headers)
    sources = sorted((plan.csrc / "torch").glob("*.cpp"))
    objects = [work / f"{source.stem}.o" for source in sources]
    commands = [
        [*compiler.command, *flags, "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    _run_all(commands, _log_path(target))
    return objects


def _run_all(commands: list[list[str]], log: Path) -> None:
    """Run commands side by side, one for each core.

    Raises:
        ShimError: one of them failed; the text ends with its last lines, the log has all.
    """
    outcomes = []
    with (
        ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool,
        ProgressBar(delay_s=0) as bar,
    ):
        bar.show("compiling the allocator for this torch, once", 0, len(commands))
        for outcome in pool.map(_run, commands):
            outcomes.append(outcome)
            bar.show("compiling the allocator for this torch, once", len(outcomes), len(commands))
    failed = [(command, text) for command, text in zip(commands, outcomes, strict=True) if text]
    if not failed:
        return
    words = "\n".join(f"$ {shlex.join(command)}\n{text}\n" for command, text in failed)
    with contextlib.suppress(OSError):  # a full disk may be what the compiler complains about
        log.write_text(words)
    last = "\n".join(failed[0][1].splitlines()[-_LAST_LINES:])
    raise ShimError(f"the shim could not be compiled (the whole log is in {log}):\n{last}")


def _run(command: list[str]) -> str:
    """Run a command; return what it said if it failed, and nothing if it did not."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=_COMMAND_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return "" if done.returncode == 0 else (done.stdout.strip() or f"exit {done.returncode}")


def _log_path(target: Path) -> Path:
    return target.with_suffix(".log")
