"""`vramx run`: a program with the allocator behind its torch, unchanged otherwise.

    vramx run train.py --epochs 3        a script, under this Python
    vramx run -m package.train           a module, under this Python
    vramx run -- torchrun train.py       any command

Sets VRAMX=1 and what was chosen, compiles the shim if it is not there yet, so that the workers of a
job need not wait for each other, and becomes the program: exit code, signals and terminal are the
program's. torch finds vramx in every process of the job by its entry point; where that is not
installed, a folder that has it goes onto PYTHONPATH (see entry_folder). A process in which the
allocator cannot be installed says so in one line on stderr and goes on with torch's own; what can
be seen before the start is said before it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vramx import config
from vramx.allocator import shim_build
from vramx.allocator.options import environment_limit, format_limit, parse_limit
from vramx.allocator.torch_facts import find_torch
from vramx.cli import common, entry_folder
from vramx.errors import InvalidValueError, VramxError

_OPTIONS_WITH_VALUE = ("--limit", "--cross-stream", "--devices", "--stats")


class _RunParser(common.OneLineParser):
    """Stops at the program: what follows is the program's, options and all.

    argparse alone cannot, as it looks for its options behind the program too.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        own, command = split_arguments(list(args or ()))
        parsed, extra = super().parse_known_args(own, namespace)
        if extra:
            accepted = ", ".join(action.option_strings[-1] for action in self._actions)
            pythons = f"; options of Python go with it, as in {self.prog} -- python {extra[0]} ..."
            self.error(
                f"unrecognized arguments: {' '.join(extra)}; accepted are {accepted}{pythons}"
            )
        if not command:
            self.error("what to run is missing: a script, -m MODULE, or -- COMMAND")
        parsed.command = command
        return parsed, extra


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into `vramx run`'s own arguments and the command to run.

    Example:
        >>> split_arguments(["--limit", "4GiB", "--", "torchrun", "train.py"])
        (['--limit', '4GiB'], ['torchrun', 'train.py'])
    """
    place = 0
    while place < len(arguments):
        word = arguments[place]
        if word == "--":
            return arguments[:place], arguments[place + 1 :]
        if word == "-m":
            rest = arguments[place:]
            return arguments[:place], [sys.executable, *rest] if len(rest) > 1 else []
        if not word.startswith("-"):
            return arguments[:place], [sys.executable, *arguments[place:]]
        place += 2 if word in _OPTIONS_WITH_VALUE else 1
    return arguments, []


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = common.add_parser_of(
        subparsers,
        _RunParser,
        "run",
        help="run a program with the allocator",
        usage="vramx run [options] SCRIPT ... | -m MODULE ... | -- COMMAND ...",
        description="Run a program, and every process that it starts, with vramx's allocator.",
        allow_abbrev=False,
    )
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        type=common.argument(_limit_text),
        help="the most to hold of a device: 24GiB, or a fraction of it (default: all of it)",
    )
    parser.add_argument(
        "--cross-stream",
        choices=config.CROSS_STREAM,
        help="when memory freed on one stream may go to another (default: under_pressure)",
    )
    parser.add_argument(
        "--devices",
        metavar="N[,N...]",
        type=common.argument(_devices_text),
        help="the GPUs to serve (default: all)",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the last events, which the snapshot of a request that fails then has",
    )
    parser.add_argument(
        "--stats",
        metavar="FILE",
        type=Path,
        help="write the allocator's statistics as JSON at exit; a child process adds its number",
    )


def run(args: argparse.Namespace) -> int:
    """Become the program; returns only by an exception."""
    settings = settings_of(args)
    config.parse({**settings, "VRAMX": "1"})
    if args.limit is None:
        environment_limit(config.config())
    command = [_executable(args.command[0]), *args.command[1:]]
    _check_script(args.command)
    if reason := _unserved(Path(command[0])):
        common.note("run", f"{reason}; the program runs, without the allocator")
    else:
        _build_shim()
    environment = config.program_environment(settings, _import_path(command))
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise VramxError(f"{command[0]} cannot be run: {error.strerror}") from None


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """Return what was chosen as variables of the environment."""
    chosen = {
        "VRAMX_LIMIT": args.limit,
        "VRAMX_CROSS_STREAM": args.cross_stream,
        "VRAMX_DEVICES": args.devices,
        "VRAMX_RECORD": "1" if args.record else None,
        "VRAMX_STATS": None,
    }
    if args.stats is not None:
        common.check_output(args.stats, force=True)
        chosen["VRAMX_STATS"] = str(args.stats.absolute())
    settings = {name: text for name, text in chosen.items() if text is not None}
    if not config.config().torch_autoload:
        common.note(
            "run", f"{config.TORCH_AUTOLOAD} is on for the program: torch finds vramx that way"
        )
        settings[config.TORCH_AUTOLOAD] = "1"
    return settings


def _limit_text(text: str) -> str:
    limit = parse_limit(text)
    if limit is None:
        raise InvalidValueError(f"limit {text!r} is {format_limit(limit)}")
    return text


def _devices_text(text: str) -> str:
    return ",".join(map(str, config.parse_devices(text)))


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise VramxError(f"{name}: no such command")
    return found


def _check_script(command: Sequence[str]) -> None:
    """Refuse a command that stands where a script does; Python says what else is wrong with one."""
    script = command[1] if command[0] == sys.executable and len(command) > 1 else ""
    if script and not Path(script).exists() and shutil.which(script):
        raise VramxError(
            f"{script} is a command and no script; write: vramx run -- {shlex.join(command[1:])}"
        )


def _unserved(program: Path) -> str:
    """Return why nothing here will be served, or nothing where that cannot be said."""
    if _is_of_libtorch(program):
        return (
            f"{program.name} is a compiled program on LibTorch, and vramx is found by Python's "
            "torch (examples/libtorch installs it in C++)"
        )
    try:
        torch = find_torch()
    except VramxError:
        return ""  # _build_shim says it
    return _no_gpu() if torch.cuda else f"torch {torch.version} is built without CUDA"


def _no_gpu() -> str:
    try:
        from vramx import _core
    except ImportError:  # the program's own warning says more
        return ""
    probe = _core.probe_cuda()
    return "" if probe["devices"] else f"there is no GPU here ({probe['error'] or 'no device'})"


def _is_of_libtorch(program: Path) -> bool:
    """Tell whether a file is a compiled program that asks the loader for torch's libraries."""
    try:
        with program.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                return text.find(b"\0libtorch") >= 0 or text.find(b"\0libc10.so") >= 0
    except (OSError, ValueError):
        return False


def _build_shim() -> None:
    """Compile the shim now; what goes wrong is said, and the program runs with torch's own."""
    try:
        torch = find_torch()
        status = shim_build.shim_status(config.config())
        if status.built is None and not status.fault:
            common.note("run", f"compiling for torch {torch.version}, once")
        shim_build.ensure_shim(config.config())
    except VramxError as error:
        common.note("run", f"the allocator will not be installed: {str(error).splitlines()[0]}")


def _import_path(command: Sequence[str]) -> Path | None:
    """Return the folder that the command's Python needs to find vramx's entry point, if any."""
    if entry_folder.finds_entry_point(entry_folder.python_of(command[0])):
        return None
    return entry_folder.make(config.config())
