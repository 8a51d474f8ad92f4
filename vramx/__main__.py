"""`python -m vramx`: the same as the `vramx` command."""

from __future__ import annotations

import sys

from vramx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
