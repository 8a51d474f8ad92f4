"""Entry point of the `vramx` command: finds the verb, runs it, turns errors into exit codes.

Exit codes: 0 done, 1 a check failed, 2 wrong usage or unreadable input (one line on stderr),
130 interrupted, 141 the reader of stdout went away. A verb's module is imported when it is called
or when help lists it, so a verb whose needs are missing takes no other verb with it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from vramx import __version__
from vramx.cli.common import OneLineParser
from vramx.errors import VramxError

DONE, CHECK_FAILED, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

# Each is the module of its name beside this one.
VERBS = (
    *("run", "demo", "doctor", "predict", "replay", "stats"),
    *("explain", "diff", "check", "plot", "bench"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Example:
        >>> main(["replay", "train.npz", "--json"])      # doctest: +SKIP
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in arguments if not word.startswith("-")), None)
    try:
        return _run(arguments, verb)
    except VramxError as error:
        return _fail(verb, " ".join(str(error).split()), BAD_INPUT)
    except KeyboardInterrupt:
        return _fail(verb, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        _abandon_stdout()
        return BROKEN_PIPE
    except OSError as error:
        _abandon_stdout()
        return _fail(verb, f"cannot write the output: {error.strerror or error}", BAD_INPUT)


def _run(arguments: list[str], verb: str | None) -> int:
    parser = OneLineParser(
        prog="vramx", description="See what GPU memory a PyTorch program needs, and need less."
    )
    parser.add_argument("-V", "--version", action="version", version=f"vramx {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb")
    modules = _add_verbs(subparsers, verb)
    try:
        args = parser.parse_args(arguments)
        if args.verb is None:
            parser.print_help()
            return DONE
        code: int = modules[args.verb].run(args)
        return code
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def _add_verbs(
    subparsers: argparse._SubParsersAction[OneLineParser], verb: str | None
) -> dict[str, ModuleType]:
    """Import the verb that is called, or all of them for help and for a verb that is unknown."""
    modules = {}
    for name in [verb] if verb in VERBS else VERBS:
        try:
            module = importlib.import_module(f"vramx.cli.{name}")
        except ImportError as error:
            if name == verb:
                raise VramxError(f"not available in this installation: {error}") from None
            continue
        module.add_parser(subparsers)
        modules[name] = module
    return modules


def _fail(verb: str | None, text: str, code: int) -> int:
    prefix = f"vramx {verb}" if verb in VERBS else "vramx"
    print(f"{prefix}: {text}", file=sys.stderr)
    return code


def _abandon_stdout() -> None:
    """Keep the interpreter's last flush from failing again on a stdout that cannot be written."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
