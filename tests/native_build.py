"""Builds the C++ test programs of tests/native, under each sanitizer set and without, with ninja.

Objects are kept under build/native, so that only what changed is compiled again (ninja reads the
compiler's list of headers) and programs of one sanitizer share the objects of the core. Nothing
here runs a program.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "native"
LAYERS = ("core", "driver", "process")  # none of the programs replays a trace
SANITIZERS = {"asan": "address,undefined", "tsan": "thread"}
# How a program is built: the sanitizers, or none and the optimiser instead.
BUILDS = {
    **{
        name: f"-O1 -fsanitize={checks} -fno-sanitize-recover=all"
        for name, checks in SANITIZERS.items()
    },
    "plain": "-O2",
}
FLAGS = "-std=c++20 -g1 -fno-omit-frame-pointer -Wall -Wextra -Werror -Wshadow -Wundef -pthread"


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
    BUILD.mkdir(parents=True, exist_ok=True)
    target = BUILD / f"probe-{sanitizer}"
    command = ["g++", f"-fsanitize={SANITIZERS[sanitizer]}", "-x", "c++", "-", "-o", str(target)]
    built = subprocess.run(command, input=b"int main() {}", capture_output=True, check=False)
    if built.returncode:
        return False
    return subprocess.run([target], capture_output=True, check=False).returncode == 0


def build(program: Program, kind: str) -> Path:
    """Compile a program as one of BUILDS says and return its path.

    Raises:
        RuntimeError: it does not compile; the text is the compiler's.
    """
    script = BUILD / "build.ninja"
    script.parent.mkdir(parents=True, exist_ok=True)
    text = ninja_file()
    if not script.exists() or script.read_text() != text:
        script.write_text(text)
    target = f"build/native/{kind}/{program.name}"
    command = [*_ninja(), "-j2", "-f", str(script.relative_to(ROOT)), target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program.main} as {kind} does not build:\n{done.stdout}")
    return ROOT / target


def ninja_file() -> str:
    """Return the text of the build.ninja for every program in every kind of build."""
    layers = [path for layer in LAYERS for path in (ROOT / "csrc" / layer).glob("*.cpp")]
    core = sorted(path.relative_to(ROOT).as_posix() for path in layers)
    sources = dict.fromkeys([*core, *(s for p in programs() for s in (p.main, *p.parts))])
    lines = ["builddir = build/native", f"flags = {FLAGS} -Icsrc -Itests/native"]
    for name, options in BUILDS.items():
        lines += [
            f"rule compile_{name}",
            f"  command = g++ -MMD -MF $out.d $flags {options} -c $in -o $out",
            "  deps = gcc",
            "  depfile = $out.d",
            # An archive, so that a program takes of the core only what it needs.
            f"rule archive_{name}",
            "  command = rm -f $out && ar rcs $out $in",
            f"rule link_{name}",
            f"  command = g++ {options} -pthread $in -o $out -ldl",
            *(f"build {_object(name, source)}: compile_{name} {source}" for source in sources),
        ]
        archive = f"build/native/{name}/core.a"
        lines.append(f"build {archive}: archive_{name} {_objects(name, core)}")
        for program in programs():
            objects = _objects(name, [program.main, *program.parts])
            target = f"build/native/{name}/{program.name}"
            lines.append(f"build {target}: link_{name} {objects} {archive}")
    return "\n".join(lines) + "\n"


def _objects(kind: str, sources: list[str]) -> str:
    return " ".join(_object(kind, source) for source in sources)


def _object(kind: str, source: str) -> str:
    return f"build/native/{kind}/{source.removesuffix('.cpp')}.o"


def _ninja() -> list[str]:
    return [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else ["ninja"]
