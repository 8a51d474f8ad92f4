"""Builds the C++ test programs of tests/native, under each sanitizer set and without, with ninja.

Objects are kept under build/native, so that only what changed is compiled again (ninja reads the
compiler's list of headers) and programs of one sanitizer share the objects of the core; without one
they are those that vramx._core is linked from. The layers are compiled in one unit, and each
program's sources in another, which takes a fraction of the time: see setup.py. Safe for processes
that build at the same time: one waits for the other. Nothing here runs a program.
"""

from __future__ import annotations

import fcntl
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "native"
LAYERS = ("core", "driver", "process")  # none of the programs replays a trace
SANITIZERS = {"asan": "address,undefined", "tsan": "thread"}
# How a program is built: with sanitizers, or plain, against the objects that users run.
# The address sanitizer reports a null pointer by itself; to ask for one at each use of a member
# takes a fifth of the time that the core takes to compile. Another fifth goes into the words for
# undefined behaviour, so that it is an illegal instruction, of which the address sanitizer tells
# the line (see OPTIONS in test_native.py). Of a call on an object of another type, which takes such
# words, nothing is told.
CHECKS = "-g1 -fno-sanitize-recover=all -fno-sanitize=null -fsanitize-undefined-trap-on-error"
BUILDS = {**{kind: f"-fsanitize={s} {CHECKS}" for kind, s in SANITIZERS.items()}, "plain": ""}
FLAGS = "-std=c++20 -fno-omit-frame-pointer -Wall -Wextra -Werror -Wshadow -Wundef -pthread"
# The compiler collects its own garbage from half a gigabyte on: a fifteenth of its time.
FLAGS += " --param ggc-min-expand=100 --param ggc-min-heapsize=512000"


@dataclass(frozen=True)
class Program:
    """A test program: the file with its main(), and the sources that are linked into it alone."""

    main: str
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        return Path(self.main).stem


def programs(root: Path = ROOT) -> list[Program]:
    """Return every tests/native/NAME.cpp, with the sources in the folder of NAME's last word.

    So driver_contract.cpp takes contract/*.cpp with it.
    """
    folder = root / "tests" / "native"
    found = []
    for path in sorted(folder.glob("*.cpp")):
        parts = sorted((folder / path.stem.split("_")[-1]).glob("*.cpp"))
        names = tuple(part.relative_to(root).as_posix() for part in parts)
        found.append(Program(path.relative_to(root).as_posix(), names))
    return found


@lru_cache
def sanitizer_runs(sanitizer: str) -> bool:
    """Say whether g++ can link and start a program under this sanitizer here."""
    # In a folder of its own: a file that another process is writing cannot be started.
    with TemporaryDirectory() as folder:
        target = f"{folder}/probe"
        command = ["g++", f"-fsanitize={SANITIZERS[sanitizer]}", "-x", "c++", "-", "-o", target]
        built = subprocess.run(command, input=b"int main() {}", capture_output=True, check=False)
        if built.returncode:
            return False
        return subprocess.run([target], capture_output=True, check=False).returncode == 0


def build(program: Program, kind: str) -> Path:
    """Compile a program as one of BUILDS says and return its path.

    Raises:
        RuntimeError: it does not compile; the text is the compiler's.
    """
    return _make(f"build/native/{kind}/{program.name}", kind)


def core_archive() -> Path:
    """Compile the core, the drivers and the process's part as users have them; return an archive.

    Raises:
        RuntimeError: it does not compile; the text is the compiler's.
    """
    return _make("build/native/plain/core.a", "plain")


def _make(target: str, kind: str) -> Path:
    commands = [[*_ninja(), "-j2", "-f", "build/native/build.ninja", target]]
    if kind == "plain":
        commands.insert(0, [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"])
    with alone_in(BUILD):
        _write_scripts()
        for command in commands:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stdout + done.stderr
                raise RuntimeError(f"{target} does not build:\n{said}")
    return ROOT / target


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder that is built in; one that is killed lets them in."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_scripts() -> None:
    """Write build.ninja and the units, each only where it changes: ninja goes by file times."""
    texts = {BUILD / "build.ninja": ninja_file()}
    for unit, members in units([*_core(), *_tests()]).items():
        texts[ROOT / unit] = "".join(f'#include "{member}"\n' for member in members)
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def units(sources: Iterable[str]) -> dict[str, list[str]]:
    """Return what is compiled for these sources, and the sources in each."""
    found: dict[str, list[str]] = {}
    for source in sources:
        found.setdefault(_unit(source), []).append(source)
    return found


def _unit(source: str) -> str:
    path = Path(source)
    name = "csrc"
    if path.match("tests/native/*.cpp"):
        name = path.stem.split("_")[-1]
    elif path.match("tests/native/*/*.cpp"):
        name = path.parent.name
    return f"build/native/units/{name}.cpp"


def ninja_file() -> str:
    """Return the text of the build.ninja for every program in every kind of build."""
    core, tests = _core(), _tests()
    # The units include sources by their path from the root.
    lines = ["builddir = build/native", f"flags = {FLAGS} -Icsrc -Itests/native -I."]
    for name, options in BUILDS.items():
        lines += [
            f"rule compile_{name}",
            f"  command = g++ -MMD -MF $out.d $flags $level {options} -c $in -o $out",
            "  deps = gcc",
            "  depfile = $out.d",
            # An archive, so that a program takes of the core only what it needs.
            f"rule archive_{name}",
            "  command = rm -f $out && ar rcs $out $in",
            f"rule link_{name}",
            f"  command = g++ {options} -pthread $in -o $out -ldl",
        ]
        for unit in units(tests if name == "plain" else [*core, *tests]):
            lines.append(f"build {_object(name, unit)}: compile_{name} {unit}")
            lines.append(f"  level = {_level(unit)}")
        archive = f"build/native/{name}/core.a"
        archived = _product_objects(core) if name == "plain" else _objects(name, core)
        lines.append(f"build {archive}: archive_{name} {archived}")
        for program in programs():
            objects = _objects(name, [program.main, *program.parts])
            target = f"build/native/{name}/{program.name}"
            lines.append(f"build {target}: link_{name} {objects} {archive}")
    return "\n".join(lines) + "\n"


def _level(unit: str) -> str:
    """Return how much is optimised: least where compiling takes longer than what is compiled.

    With sanitizers -O1 takes up to two thirds longer to compile than -Og, to run 5 % faster.
    """
    return "-Og" if Path(unit).stem in ("csrc", "stress") else "-O0"


def _core() -> list[str]:
    layers = [path for layer in LAYERS for path in (ROOT / "csrc" / layer).glob("*.cpp")]
    return sorted(path.relative_to(ROOT).as_posix() for path in layers)


def _tests() -> list[str]:
    return [source for program in programs() for source in (program.main, *program.parts)]


def _objects(kind: str, sources: list[str]) -> str:
    return " ".join(_object(kind, unit) for unit in units(sources))


def _object(kind: str, unit: str) -> str:
    name = unit.removeprefix("build/native/units/").removesuffix(".cpp")
    return f"build/native/{kind}/{name}.o"


def _product_objects(sources: list[str]) -> str:
    """Return the objects of these sources that setup.py makes."""
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return " ".join(setup.object_of(unit) for unit in setup.units(sources))


def _ninja() -> list[str]:
    return [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else ["ninja"]
