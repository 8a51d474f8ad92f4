"""`vramx explain --confirm -- COMMAND`: the advised remedies, each tried in a process of its own.

Each is the command as it was given, with the remedy's variables in its environment; its output goes
to stderr. What it held at most is compared with what the replay said it would: of the whole run,
also where the recording ends at a request that failed, so that a program which goes on to need more
differs. Of a job of several processes the one that held the most counts.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramx import config
from vramx.allocator import peaks
from vramx.cli import common, entry_folder
from vramx.errors import VramxError
from vramx.sizes import format_gib

if TYPE_CHECKING:
    from vramx.memory.explain import Explanation, Remedy

TOLERANCE = 0.02
_CONF, _NEWER_CONF = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
_EXPANDABLE = "expandable_segments"


@dataclass(frozen=True)
class Confirmed:
    """What a remedy was said to hold, and what it held."""

    policy: str
    expected_bytes: int
    measured_bytes: int | None  # None where no process of the command used CUDA to its end
    exit_code: int
    is_under_it: bool  # whether every process had the allocator that was meant

    @property
    def difference(self) -> float | None:
        """What was measured beyond what was expected, relative to that."""
        if self.measured_bytes is None or not self.expected_bytes:
            return None
        return self.measured_bytes / self.expected_bytes - 1

    @property
    def ok(self) -> bool:
        """Whether the command ran, and held what was expected."""
        return (
            self.exit_code == 0
            and self.is_under_it
            and self.difference is not None
            and abs(self.difference) <= TOLERANCE
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the keys of the JSON report."""
        return {**asdict(self), "ok": self.ok}


def advised(why: Explanation) -> list[Remedy]:
    """Return the remedies that may help: other policies than that of the recording which fit."""
    return [
        each
        for each in why.remedies
        if each.policy != why.recorded_policy and each.fits is not False
    ]


def confirm(why: Explanation, command: Sequence[str]) -> list[Confirmed]:
    """Run a command once for each remedy that is advised.

    Raises:
        VramxError: the command cannot be run.
    """
    given = why.capacity.low_bytes if why.capacity and why.capacity.source == "given" else None
    found = []
    for remedy in advised(why):
        common.note("explain", f"running {command[0]} with {remedy.policy}")
        with tempfile.TemporaryDirectory(prefix="vramx-peaks-") as folder:
            environment = environment_of(remedy.policy, Path(folder), given, command[0])
            try:
                # Its output is not the report's.
                done = subprocess.run(command, env=environment, stdout=2, check=False)
            except OSError as error:
                raise VramxError(f"{command[0]} cannot be run: {error.strerror}") from None
            held = peaks.read(Path(folder))
        found.append(
            Confirmed(
                remedy.policy,
                expected_bytes=remedy.expected_reserved_bytes,
                measured_bytes=held.peak_bytes,
                exit_code=done.returncode,
                is_under_it=held.allocators <= {_allocator(remedy.policy)},
            )
        )
    return found


def environment_of(
    policy: str, folder: Path, limit_bytes: int | None, program: str
) -> dict[str, str]:
    """Return the environment of a program under a policy, whose peaks go to a folder."""
    settings = {"VRAMX_PEAKS": str(folder), config.TORCH_AUTOLOAD: "1"}
    settings["VRAMX_ALLOCATOR"] = _allocator(policy)
    if limit_bytes is not None:
        settings["VRAMX_LIMIT"] = str(limit_bytes)
    is_found = entry_folder.finds_entry_point(entry_folder.python_of(program))
    path = None if is_found else entry_folder.make(config.config())
    environment = config.program_environment(settings, path)
    environment[_CONF] = _alloc_conf(environment, policy == "expandable")
    environment.pop(_NEWER_CONF, None)
    return environment


def _allocator(policy: str) -> str:
    return "vramx" if policy == "vramx" else "torch"


def _alloc_conf(environment: Mapping[str, str], is_expandable: bool) -> str:
    """Return torch's settings as they are, but for the one that is the remedy."""
    given = environment.get(_NEWER_CONF) or environment.get(_CONF) or ""
    kept = [item for item in given.split(",") if item and not item.startswith(_EXPANDABLE)]
    return ",".join([*kept, f"{_EXPANDABLE}:{is_expandable}"])


def table(found: Sequence[Confirmed], names: Mapping[str, str]) -> Any:
    """Lay out what was expected beside what was measured."""
    rows = [
        [
            names[each.policy],
            format_gib(each.expected_bytes),
            "-" if each.measured_bytes is None else format_gib(each.measured_bytes),
            "-" if each.difference is None else f"{each.difference:+.1%}",
            _verdict(each),
        ]
        for each in found
    ]
    return common.table(("tried", ">said to hold", ">held", ">difference", ""), rows)


def _verdict(each: Confirmed) -> str:
    if each.exit_code:
        return f"it failed: exit code {each.exit_code}"
    if each.measured_bytes is None:
        return "no process of it used CUDA and came to its end"
    if not each.is_under_it:
        return "it ran under another allocator: its own, or vramx could not be installed"
    return "as said" if each.ok else f"off by more than {TOLERANCE:.0%}"
