"""Finds or makes the Python with another release of torch, and prints its path.

    PYTHON .ci/versions.py 2.6|2.8|2.11|2.14|2.15   called by a Python of the version that it has

Each is an environment of its own in .venv-versions, with what the tests of hooks and checkpoints
need; the compiled core is that of the checkout, which knows no torch. A stamp says from which pins
it is. A release takes some gigabytes and minutes.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import venv
from pathlib import Path

from environment import ROOT, fail, install, pin, say

FOLDER = ROOT / ".venv-versions"
RELEASES = {
    "2.6": "torch==2.6.0",
    "2.8": "torch==2.8.0",
    "2.11": "torch==2.11.0",
    "2.14": "torch==2.14.1",
    "2.15": "torch==2.15.0",
}
# Triton before 3.7 cannot interpret kernels with numpy 2.4.
BESIDE = ("numpy<2.4", *map(pin, ("pytest", "pytest-xdist", "hypothesis", "rich")))


def main(release: str) -> int:
    if release not in RELEASES:
        return fail(f"releases are {', '.join(RELEASES)}; got {release or 'none'}")
    wanted = (RELEASES[release], *BESIDE)
    folder = FOLDER / release
    python, stamp = folder / "bin" / "python", folder / "vramx-pins"
    pins = hashlib.sha256("\n".join((sys.executable, *wanted)).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != pins:
        say(f"making {folder.relative_to(ROOT)} with {', '.join(wanted)}")
        make(folder)
        if not install(str(python), list(wanted)):
            return fail(f"{RELEASES[release]} could not be installed; pip's words are above")
        stamp.write_text(pins)
    print(python)
    return 0


def make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else ""))
