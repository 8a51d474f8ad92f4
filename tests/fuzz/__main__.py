"""The command: python -m tests.fuzz --programs 2000 --seed 1."""

from __future__ import annotations

import argparse
import random
import sys

import torch

from tests.fuzz.compare import FaultError, check
from tests.fuzz.faults import FAULTS, ONLY_WITH_CUDA
from tests.fuzz.grammar import left_out
from tests.fuzz.search import search
from tests.fuzz.settings import Setting


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000, help="how many are compared")
    parser.add_argument("--seed", type=int, default=None, help="of the programs; else a new one")
    parser.add_argument(
        "--faults", action="store_true", help="plant each fault: the programs must fail with it"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}; left out: {', '.join(left_out()) or 'nothing'}", flush=True)
    if options.faults:
        return _plant_all(options.programs, seed)
    found = search(options.programs, seed)
    print(found)
    print(f"seed {seed}: {found.checked} compared; not usable: {dict(found.unusable)}")
    return 1 if found.fault else 0


def _plant_all(count: int, seed: int) -> int:
    """Say which programs find each fault: its own, which must, and drawn ones."""
    faults = FAULTS | (ONLY_WITH_CUDA if torch.cuda.is_available() else {})
    missed = 0
    for name, fault in faults.items():
        with fault.plant():
            own = _fault_of(*fault.program)
            found = search(count, seed, names=fault.names, shrink=False)
        missed += not own
        print(f"{name}: {own or 'NOT FOUND'}")
        print(f"    drawn: {found.fault or 'not found'} ({found.checked} programs)", flush=True)
    return 1 if missed else 0


def _fault_of(source: str, setting: Setting) -> str:
    try:
        check(source, setting)
    except FaultError as fault:
        return str(fault)
    return ""


if __name__ == "__main__":
    sys.exit(main())
