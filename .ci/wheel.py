"""Builds the sdist and the wheel into dist/, and tests the wheel where there is no checkout.

    PYTHON .ci/wheel.py sdist             the sdist
    PYTHON .ci/wheel.py wheel             the wheel of this Python, from the sdist
    PYTHON .ci/wheel.py test [PYTHON...]  both, and tests/wheel/checks.py in a fresh environment

The wheel is built from the sdist and in isolation, so that a file that MANIFEST.in forgets, or a
package that [build-system] does not name, ends the build. The environment that the wheel is
installed into is outside of the checkout and sees the packages of the Python that calls this, for
torch is there once. Another Python that is named (python3.13) gets numpy and rich alone: there the
checks that need torch are skipped, by name. Paths that were made are printed; the rest goes to
stderr.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from environment import PINS, ROOT, fail, install, pin
from libraries import make as make_over_this_python

DIST = ROOT / "dist"
CHECKS = ROOT / "tests" / "wheel"
# What the checks need of a Python that has no torch.
BESIDE = ("numpy", "rich", "pytest")


def main(words: list[str]) -> int:
    verb, *pythons = words or [""]
    if verb == "sdist":
        print(build_sdist())
    elif verb == "wheel":
        print(build_wheel(sys.executable, build_sdist()))
    elif verb == "test":
        sdist = build_sdist()
        failed = [each for each in (sys.executable, *pythons) if not passes(each, sdist)]
        return fail(f"the wheel fails under {', '.join(failed)}") if failed else 0
    else:
        return fail(f"accepted are sdist, wheel and test; got {verb or 'none'}")
    return 0


def build_sdist() -> Path:
    """Return the sdist of the checkout as it is, and leave nothing else there."""
    for old in DIST.glob("vramx-*.tar.gz"):
        old.unlink()
    # Where it is found, torch takes vramx for installed.
    metadata = ROOT / "vramx.egg-info"
    was_there = metadata.exists()
    run([sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(DIST)], cwd=ROOT)
    if not was_there:
        shutil.rmtree(metadata)
    return only(DIST, "vramx-*.tar.gz")


def build_wheel(python: str, sdist: Path) -> Path:
    """Return the wheel that this Python builds from the sdist."""
    with TemporaryDirectory() as folder:
        pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        run([*pip, "--wheel-dir", folder, str(sdist)], cwd=Path(folder))
        built = only(Path(folder), "*.whl")
        return Path(shutil.copy(built, DIST))


def passes(python: str, sdist: Path) -> bool:
    """Say whether the checks pass with the wheel in a fresh environment of this Python."""
    wheel = build_wheel(python, sdist)
    print(wheel)
    with TemporaryDirectory() as folder:
        fresh = make_environment(python, Path(folder) / "environment")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(fresh)]
        run([*pip, "install", "--quiet", "--no-deps", str(wheel)])
        checks = shutil.copytree(CHECKS, Path(folder) / "checks")
        with tarfile.open(sdist) as packed:  # to compare the sources with, in place of the checkout
            packed.extractall(Path(folder) / "sdist")  # of our own making
        # Nothing of the checkout is to be found by a path in the environment.
        variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        variables["VRAMX_SOURCES"] = str(only(Path(folder) / "sdist", "vramx-*"))
        command = [str(fresh), "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "checks.py"]
        return not subprocess.run(command, cwd=checks, env=variables, check=False).returncode


def make_environment(python: str, folder: Path) -> Path:
    """Return the Python of a new environment that has what the checks need, and no vramx."""
    if python == sys.executable:
        make_over_this_python(folder)
        return folder / "bin" / "python"
    run([python, "-m", "venv", str(folder)])
    fresh = folder / "bin" / "python"
    if not install(str(fresh), ["-c", str(PINS), *BESIDE]):
        raise SystemExit(fail(f"{', '.join(map(pin, BESIDE))} could not be installed"))
    return fresh


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run a command, or end with what it said."""
    if subprocess.run(command, cwd=cwd, stdout=sys.stderr, check=False).returncode:
        raise SystemExit(fail(f"failed: {' '.join(command)}"))


def only(folder: Path, pattern: str) -> Path:
    """Return the one path of a folder that matches."""
    (found,) = folder.glob(pattern)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
