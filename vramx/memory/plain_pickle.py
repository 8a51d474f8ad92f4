"""Reads a pickle that holds plain data, and nothing else, from a source that is not trusted.

A pickle is a program. Two things keep it from doing harm. First its opcodes are scanned without
being run: only those that build dicts, lists, tuples, numbers and text are accepted, and only a
bounded number of them. Then an unpickler whose `find_class` always raises runs it, so that even an
opcode missed by the scan finds nothing to call. The scan takes 2 s for a snapshot of 300 000 events
(24 MB); unpickling takes a third of that.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, NoReturn

from vramx.errors import TraceError

PICKLE_MAGIC = b"\x80"  # of every protocol from 2 on; torch writes no older one

_CONTAINERS = frozenset(
    (
        "EMPTY_DICT",
        "DICT",
        "EMPTY_LIST",
        "LIST",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
    )
)
_FILLS = frozenset(("APPEND", "APPENDS", "SETITEM", "SETITEMS"))
_NUMBERS = frozenset(
    ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
)
_CONSTANTS = frozenset(("NONE", "NEWTRUE", "NEWFALSE"))
_TEXTS = frozenset(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"))
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_GETS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_STACK = frozenset(("PROTO", "FRAME", "MARK", "POP", "POP_MARK", "DUP", "STOP"))
_PLAIN = _CONTAINERS | _FILLS | _NUMBERS | _CONSTANTS | _TEXTS | _PUTS | _GETS | _STACK
# Those that import or call; the rest of what is refused is data of kinds a snapshot never has.
_CALLS = frozenset(
    (
        *("GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD"),
        *("EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"),
    )
)
# An empty dict takes 64 bytes and one opcode: this keeps a small file from filling memory (2 GiB).
MAX_CONTAINERS = 1 << 25


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise TraceError(f"the pickle names {module}.{name}; only plain data is accepted")


def load_plain_pickle(data: bytes) -> Any:
    """Return the object in a pickle of plain data; run nothing.

    Raises:
        TraceError: not a pickle, cut short, asking for code, or asking for too much memory.
    """
    try:
        _scan(data)
        return _PlainUnpickler(io.BytesIO(data)).load()
    except TraceError:
        raise
    except Exception as error:  # damage shows itself as any of a dozen types
        detail = " ".join(str(error).split())[:80]
        raise TraceError(f"it is no complete pickle ({detail or type(error).__name__})") from None


def _scan(data: bytes) -> None:
    containers = puts = 0
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name not in _PLAIN:
            raise TraceError(_refusal(name, argument))
        containers += name in _CONTAINERS
        if containers > MAX_CONTAINERS:
            raise TraceError(f"the pickle builds more than the {MAX_CONTAINERS} objects accepted")
        if name in _PUTS:
            # The unpickler makes room up to the largest index, and picklers count from 0 or 1.
            if argument is not None and argument > puts + 1:
                raise TraceError(f"the pickle's memo jumps to index {argument} after {puts}")
            puts += 1


def _refusal(opcode: str, argument: object) -> str:
    what = "asks for code to be run" if opcode in _CALLS else "holds more than plain data"
    named = f" {argument!r}"[:80] if argument is not None else ""
    return f"the pickle {what} ({opcode}{named}), which is refused; only plain data is accepted"
