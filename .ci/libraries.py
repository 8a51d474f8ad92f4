"""Finds or makes the Python with the libraries of one release of transformers, and prints its path.

    PYTHON .ci/libraries.py newest|5.17|4        called by the Python that has torch and pytest

Each is an environment of its own in .venv-libraries, over the packages of the Python that calls
this, so that torch is there once. A stamp says from which pins it is. What depends on torch by a
version of its own, as torchvision, is installed without what it asks for.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

from environment import PINS, ROOT, fail, install, pin, say

FOLDER = ROOT / ".venv-libraries"
OTHERS = ("peft", "accelerate", "lightning", "torch-geometric", "pt-snap-cli")
ALONE = ("torchvision", "timm")
# The newest is that of constraints.txt. 5.17 is the last whose calls are as those of 5.3.
RELEASES = {
    "newest": (pin("transformers"), *map(pin, OTHERS)),
    "5.17": ("transformers==5.17.0",),
    "4": ("transformers==4.57.6",),
}


def main(release: str) -> int:
    if release not in RELEASES:
        return fail(f"releases are {', '.join(RELEASES)}; got {release or 'none'}")
    alone = tuple(map(pin, ALONE)) if release == "newest" else ()
    folder = FOLDER / release
    python, stamp = folder / "bin" / "python", folder / "vramx-pins"
    wanted = hashlib.sha256(
        "\n".join((sys.executable, *RELEASES[release], *alone)).encode() + PINS.read_bytes()
    ).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        say(f"making {folder.relative_to(ROOT)} with {', '.join((*RELEASES[release], *alone))}")
        make(folder)
        if not install(
            str(python),
            ["-c", str(PINS), *RELEASES[release]]
            if release == "newest"
            else list(RELEASES[release]),
        ):
            return fail("the libraries could not be installed; pip's words are above")
        if alone and not install(str(python), ["--no-deps", *alone]):
            say(f"going on without {', '.join(alone)}: their tests are skipped")
        stamp.write_text(wanted)
    print(python)
    return 0


def make(folder: Path) -> None:
    """Make an environment, without pip, that sees the packages of this Python below its own."""
    venv.create(folder, clear=True, with_pip=False)
    code = "import site, sys; print(*[p for p in sys.path if p.endswith('-packages')], sep='\\n')"
    below = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = next(folder.glob("lib/python3*/site-packages"))
    (own / "below.pth").write_text(below.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else ""))
