"""The process that benchmarks/recipes.py starts: it runs one variant of one recipe.

    python _recipes.py RECIPE/VARIANT

Imports what takes long before its turn on the GPU. Prints a line of JSON for each figure, or one
with a status where there are none.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from typing import Any

from benchmarks.programs import _turn
from benchmarks.programs._report import is_tiny, tell
from benchmarks.recipes import UNITS, script

LLAMA = "transformers.models.llama.modeling_llama"
AHEAD = {"lora": (LLAMA, "peft")}
# What installs the allocator does so before these: torchao, which they import, initialises CUDA.
INSTALLS = "vramx_allocator"


def main(case: str) -> None:
    recipe, _, variant = case.partition("/")
    module = script(recipe)
    for name in () if INSTALLS in variant else AHEAD.get(recipe, (LLAMA,)):
        with contextlib.suppress(ImportError):  # the recipe says what it lacks
            importlib.import_module(name)
    _turn.wait()
    os.environ.pop(_turn.TURN, None)  # not for processes that the recipe starts
    common = script("common")
    figures = common.run(module.VARIANTS, variant, common.Place(small=is_tiny()))
    for line in lines(case, figures):
        tell(**line)


def lines(case: str, figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line for each figure that has a unit here, or one with what went wrong."""
    status = figures["status"]
    if status != "ok":
        has_failed = not status.startswith(("not installed", "not run"))
        return [{"case": case, "status": f"failed: {status}" if has_failed else status}]
    found = []
    for metric, unit in UNITS.items():
        value = figures.get(metric)
        if value is not None:
            values = value if isinstance(value, list) else [value]
            found.append({"case": case, "metric": metric, "unit": unit, "values": values})
    return found


if __name__ == "__main__":
    main(sys.argv[1])
