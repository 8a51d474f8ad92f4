"""What vramx's ways and libraries do to one model in either order, as the tests hold it.

    python tests/interactions.py > docs/interactions.md

test_patch_libraries_table.py runs each cell of the first table, and test_patch_two_processes.py
each of the second. Imports nothing, so that processes of these tests can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

OURS = {
    "packed": "`compressed_activations`",
    "recomputed": "`checkpoint_modules`",
    "fused": "`optimize`",
    "planned": "`plan(...).apply()`",
}
THEIRS = {
    "accelerate": "`accelerate.prepare`",
    "Trainer": "transformers' `Trainer`",
    "Lightning": "a `LightningModule` around it",
    "DDP": "DDP",
    "FSDP2": "FSDP2 (`fully_shard`)",
    "compile": "`torch.compile`",
    "deepcopy": "`copy.deepcopy`",
    "EMA": "EMA (`AveragedModel`)",
}
# Which of the two is done first.
FIRST = ("ours", "theirs")

# What ends in one line, of ours after theirs, and the words that it has.
TOLD = {
    ("fused", "FSDP2"): "derived from LlamaDecoderLayer",
    ("planned", "compile"): "compiled already",
}
# A compiled graph keeps exactly what goes into it, and what it saves, as a VramxWarning says once.
COMPILED = frozenset(
    (ours, "compile", first) for ours in ("packed", "recomputed") for first in FIRST
)
# A sharded block is of no known class: a plan packs what it saves, from 1 MiB, and it has less.
SMALL = frozenset({("planned", "FSDP2", "theirs")})
EXACT = COMPILED | SMALL

# On two processes. A block of a class of FSDP's is of no known family.
SPREAD_OURS = ("packed", "recomputed", "fused")
SPREAD_THEIRS = ("DDP", "FSDP2")
UNFUSED = ("fused", "FSDP2", "theirs")

_HEAD = """\
# Beside other libraries

vramx changes a model that other libraries change too, before it or after it. The tests train a
small Llama of transformers in each of these ways, in both orders, and compare its gradients with
those of a model that only the library changed. In every cell `vramx.report(model)` finds what was
done, through the library's wrappers, and after `vramx.restore(model)` the gradients are those of
the model without vramx, bit for bit.

* **near**: the gradients differ from the exact ones by the noise of int8, and not more.
* **exact**: nothing is packed, and the gradients are the exact ones; a warning says so once where
  the graph of `torch.compile` is why.
* **left**: the blocks stay as they are, and one line says why: it has the words that stand here.
"""
_PROCESSES = """\

## On two processes

Each process trains with half of a batch. Both have the same gradients, near those of the whole
batch, and `vramx.restore` undoes all of it on both, bit for bit.
"""


def result(ours: str, theirs: str, first: str) -> str:
    """Return what a cell of the first table says."""
    if first == "theirs" and (ours, theirs) in TOLD:
        return f"left: {TOLD[ours, theirs]}"
    if (ours, theirs, first) in COMPILED:
        return "exact"
    return "exact: all is smaller than 1 MiB" if (ours, theirs, first) in SMALL else "near"


def result_of_processes(ours: str, theirs: str, first: str) -> str:
    """Return what a cell of the second table says."""
    return "left" if (ours, theirs, first) == UNFUSED else "near"


def page() -> str:
    """Return the page of the documentation."""
    both = [_table(OURS, THEIRS, result), _table(SPREAD_OURS, SPREAD_THEIRS, result_of_processes)]
    return f"{_HEAD}\n{both[0]}{_PROCESSES}\n{both[1]}"


def _table(
    ours: Collection[str], theirs: Collection[str], say: Callable[[str, str, str], str]
) -> str:
    orders = [(each, first) for each in theirs for first in FIRST]
    lines = [["", *(OURS[name] for name in ours)], ["---"] * (1 + len(ours))]
    for each, first in orders:
        order = f"vramx, then {THEIRS[each]}" if first == "ours" else f"{THEIRS[each]}, then vramx"
        lines.append([order, *(say(name, each, first) for name in ours)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
