"""Reads a pickle that holds plain data, and nothing else, from a source that is not trusted.

A pickle is a program. Two things keep it from doing harm. First its opcodes are scanned without
being run: only those that build dicts, lists, tuples, numbers and text are accepted, and only a
bounded number of them. Then an unpickler whose `find_class` always raises runs it, so that even an
opcode missed by the scan finds nothing to call. The scan takes about as long as the unpickling:
what is harmless is passed over in runs, by one regular expression, and the rest is looked at.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, NoReturn

from vramx.errors import TraceError

PICKLE_MAGIC = b"\x80"  # of every protocol from 2 on; torch writes no older one

_CONTAINERS = frozenset(
    (
        *("EMPTY_DICT", "DICT", "EMPTY_LIST", "LIST"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
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

_CONTAINER_BYTES = frozenset(
    ord(opcode.code) for opcode in pickletools.opcodes if opcode.name in _CONTAINERS
)
_LONG_BINPUT = ord("r")
_STOP = ord(".")
_LONGEST_IN_RUN = 16  # bytes of a number or a text; a longer one is looked at by itself


def _counted(prefix: bytes, rest_of_length: bytes = b"") -> bytes:
    """Match an opcode with its length and as many bytes."""
    lengths = (
        re.escape(bytes([count])) + rest_of_length + b"." * count
        for count in range(_LONGEST_IN_RUN + 1)
    )
    return prefix + b"(?:" + b"|".join(lengths) + b")"


def _runs(others: bytes = b"") -> re.Pattern[bytes]:
    """Match runs of opcodes that take no room worth counting, and of others without arguments.

    These are numbers, short texts, fills, gets, and puts below 256; the most frequent come first.
    """
    kinds = (
        *(rb"j....", b"[" + re.escape(b"\x88\x89\x94N(012aesu" + others) + b"]"),
        *(rb"[hKq\x80].", rb"J....", rb"M..", rb"[G\x95].{8}"),
        _counted(rb"\x8a"),  # LONG1
        _counted(rb"\x8c"),  # SHORT_BINUNICODE
        _counted(rb"X", rb"\x00\x00\x00"),  # BINUNICODE
    )
    # Bounded because the matcher keeps a place to come back to for each of a run's opcodes.
    return re.compile(b"(?:" + b"|".join(kinds) + b"){1,1000}", re.DOTALL)


_RUN, _RUN_WITH_CONTAINERS = _runs(), _runs(bytes(_CONTAINER_BYTES))


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
    stream = io.BytesIO(data)
    position = containers = 0
    # Of bytes that might be containers there are no less than of containers.
    most = len(data) - len(data.translate(None, bytes(_CONTAINER_BYTES)))
    runs = _RUN if most > MAX_CONTAINERS else _RUN_WITH_CONTAINERS
    while True:
        if run := runs.match(data, position):
            position = run.end()
        opcode = data[position] if position < len(data) else None
        if opcode in _CONTAINER_BYTES:
            position += 1
            containers += 1
            if containers > MAX_CONTAINERS:
                raise TraceError(
                    f"the pickle builds more than the {MAX_CONTAINERS} objects accepted"
                )
        elif opcode == _LONG_BINPUT:
            _check_put(int.from_bytes(data[position + 1 : position + 5], "little"), position)
            position += 5
        elif opcode == _STOP:
            return
        else:
            position = _check_opcode(stream, position)


def _check_opcode(stream: io.BytesIO, position: int) -> int:
    """Look at the one opcode there; return where the next begins."""
    stream.seek(position)
    opcode, argument, _ = next(pickletools.genops(stream))
    if opcode.name not in _PLAIN:
        raise TraceError(_refusal(opcode.name, argument))
    if opcode.name in _PUTS and argument is not None:
        _check_put(argument, position)
    return stream.tell()


def _check_put(index: int, position: int) -> None:
    # The unpickler makes room up to the largest index; picklers count, and each put takes a byte.
    if index > position:
        raise TraceError(f"the pickle's memo jumps to index {index} at byte {position}")


def _refusal(opcode: str, argument: object) -> str:
    what = "asks for code to be run" if opcode in _CALLS else "holds more than plain data"
    named = f" {argument!r}"[:80] if argument is not None else ""
    return f"the pickle {what} ({opcode}{named}), which is refused; only plain data is accepted"
