"""The command: python -m tests.fuzz --programs 2000 --seed 1."""

from __future__ import annotations

import argparse
import random
import sys

import torch
from tests.fuzz.grammar import left_out
from tests.fuzz.search import search


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000, help="how many are compared")
    parser.add_argument("--seed", type=int, default=None, help="of the programs; else a new one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}; left out: {', '.join(left_out()) or 'nothing'}", flush=True)
    found = search(options.programs, seed)
    print(found)
    print(f"seed {seed}: {found.checked} compared; not usable: {dict(found.unusable)}")
    return 1 if found.fault else 0


if __name__ == "__main__":
    sys.exit(main())
