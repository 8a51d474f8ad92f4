"""Makes what is made in the pages, or says where it is not as it would be."""

from __future__ import annotations

import argparse
import difflib
import sys

from benchmarks.documents import __doc__ as description
from benchmarks.documents.pages import pages, remade
from benchmarks.documents.prune import prune
from benchmarks.harness import ROOT


def main(arguments: list[str] | None = None) -> int:
    """Check or write all pages, or prune the rows; return 1 where a check fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.documents",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--write", action="store_true")
    choice.add_argument("--prune", action="store_true")
    args = parser.parse_args(arguments)
    if args.prune:
        for line in prune():
            print(line)
        return 0
    differing = 0
    for path in pages():
        text = path.read_text()
        try:
            made = remade(text)
        except LookupError as error:
            print(f"{path.relative_to(ROOT)}: {error.args[0]}", file=sys.stderr)
            return 2
        if made == text:
            continue
        differing += 1
        if args.write:
            path.write_text(made)
        else:
            name = str(path.relative_to(ROOT))
            lines = (text.splitlines(), made.splitlines())
            print(
                *difflib.unified_diff(*lines, name, "as it would be made", n=0, lineterm=""),
                sep="\n",
            )
    return int(bool(differing) and args.check)


if __name__ == "__main__":
    sys.exit(main())
