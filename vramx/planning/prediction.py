"""What predict() returns: peaks by level and policy, where they are, and what is beside them.

Pure values; imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vramx.errors import InvalidValueError, brief
from vramx.patch.table import aligned
from vramx.sizes import format_size

SCHEMA = 1
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class PredictedRow:
    """The peak of a step at one level.

    Attributes:
        level: the word of the level, or "as it is".
        peak_bytes: what each policy reserves at most; of "live", what is requested at once.
        allocated_bytes: what torch.cuda.max_memory_allocated() says under each policy: of blocks,
            which torch's own allocator leaves up to 1 MiB larger than what is requested.
        phase, module: where the live peak is; the module's path, "" outside of all modules.
        before_bytes: what is there before the step: parameters, buffers, states and the batch.
        why_not: why there is no prediction for this level; None: there is one.
    """

    level: str
    peak_bytes: Mapping[str, int]
    phase: str = ""
    module: str = ""
    before_bytes: int = 0
    why_not: str | None = None
    allocated_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The phase and the module, as text."""
        return f"{self.phase} of {self.module}" if self.module else self.phase


@dataclass(frozen=True)
class Prediction:
    """Peaks of a training step that was not run; text by str().

    Attributes:
        rows: one a level, in the order in which they were asked for.
        beside: bytes that are in no peak, by what takes them.
        assumptions: what was taken for known though data or libraries decide it.

    Example:
        >>> row = PredictedRow("int8", {"live": 1 << 30}, "backward", "layers.3")
        >>> Prediction((row,), {}, ()).peak_bytes()
        1073741824
    """

    rows: tuple[PredictedRow, ...]
    beside: Mapping[str, int]
    assumptions: tuple[str, ...]

    def row(self, level: str | None = None) -> PredictedRow:
        """Return the row of a level, the first without one.

        Raises:
            InvalidValueError: the level was not asked for, or it has no prediction.
        """
        by_level = {row.level: row for row in self.rows}
        found = self.rows[0] if level is None else by_level.get(level)
        if found is None or found.why_not is not None:
            accepted = [row.level for row in self.rows if row.why_not is None]
            raise InvalidValueError(
                f"level {brief(level)} has no prediction; accepted are "
                f"{', '.join(map(repr, accepted)) or 'none'}"
            )
        return found

    def peak_bytes(self, policy: str = "live", level: str | None = None) -> int:
        """Return the peak under a policy at a level; the first level without one.

        Raises:
            InvalidValueError: the policy or the level was not asked for.
        """
        return _of_policy(self.row(level).peak_bytes, policy)

    def allocated_bytes(self, policy: str = "native", level: str | None = None) -> int:
        """Return what torch.cuda.max_memory_allocated() is to say; arguments are peak_bytes()'s."""
        return _of_policy(self.row(level).allocated_bytes, policy)

    def needed_bytes(self, policy: str = "native", level: str | None = None) -> int:
        """Return the memory that a GPU must have: a peak and all that is beside it."""
        return self.peak_bytes(policy, level) + sum(self.beside.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as the JSON report has them."""
        return {
            "schema": SCHEMA,
            "rows": [
                {
                    "level": row.level,
                    "peak_bytes": dict(row.peak_bytes),
                    "allocated_bytes": dict(row.allocated_bytes),
                    "before_bytes": row.before_bytes,
                    "phase": row.phase,
                    "module": row.module,
                    "why_not": row.why_not,
                }
                for row in self.rows
            ],
            "beside_bytes": dict(self.beside),
            "assumptions": list(self.assumptions),
        }

    def to_json(self) -> str:
        """Return to_dict() as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        policies = next((tuple(row.peak_bytes) for row in self.rows if row.peak_bytes), ())
        lines = [("level", *policies, "where the peak is")]
        for row in self.rows:
            if row.why_not is None:
                peaks = (format_size(row.peak_bytes[policy]) for policy in policies)
                lines.append((row.level, *peaks, row.where))
            else:
                lines.append((row.level, *("-" for _ in policies), row.why_not))
        text = aligned(lines)
        text += [f"beside: {name} {format_size(n)}" for name, n in self.beside.items()]
        return "\n".join([*text, *(f"assumed: {each}" for each in self.assumptions)])


def _of_policy(found: Mapping[str, int], policy: str) -> int:
    if policy not in found:
        raise InvalidValueError(
            f"policy {brief(policy)} has no prediction; accepted are {', '.join(map(repr, found))}"
        )
    return found[policy]
