"""Snapshots from a stranger: code, bombs, damage and nonsense are refused in one line."""

from __future__ import annotations

import gzip
import io
import pickle
import pickletools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import block, event, segment

from vramx.errors import TraceError
from vramx.memory import plain_pickle
from vramx.memory.trace import load_trace

# Without the time: it would be in the names of tests, which processes would call differently.
_PACKED = gzip.compress(zlib.compress(bytes(1000)), mtime=0)
DAMAGED = _PACKED[:12] + bytes([_PACKED[12] ^ 0xFF]) + _PACKED[13:]


class _Call:
    """Pickles as a call of `function`, as a malicious snapshot would hold."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    witness = tmp_path / "witness"
    snapshot = {"segments": [], "device_traces": [[_Call(Path.touch, witness)]]}
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol))
    with pytest.raises(TraceError, match="asks for code to be run"):
        load_trace(path)
    assert not witness.exists()
    pickle.loads(path.read_bytes())  # the same bytes do run where nothing is refused
    assert witness.exists()


def test_the_unpickler_refuses_names_by_itself() -> None:
    data = pickle.dumps(_Call(print, "x"))
    unpickler = plain_pickle._PlainUnpickler(io.BytesIO(data))
    with pytest.raises(TraceError, match=r"names builtins\.print"):
        unpickler.load()


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("bytes.pickle", pickle.dumps({"segments": [b"x"]}), "only plain data is accepted"),
        # LONG_BINPUT 2^31 - 1: a table of 32 GiB.
        ("memo.pickle", b"\x80\x04}r\xff\xff\xff\x7f.", "memo jumps to index 2147483647"),
        # Text that claims more than the file has.
        ("long.pickle", b"\x80\x04\x8d" + bytes(7) + b"\x10abc.", "no complete pickle"),
        ("deep.json", b"[" * 200_000, "no complete JSON"),
        ("many.pickle", b"\x80\x04](" + b"}" * 1001 + b"e.", "more than the 1000 objects"),
        ("bomb.json.gz", gzip.compress(bytes(2 << 20), mtime=0), "larger than the 1 MiB accepted"),
        ("bad.pickle.gz", DAMAGED, ""),
    ],
)
def test_files_that_would_fill_memory_or_are_damaged_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, what: str
) -> None:
    monkeypatch.setattr(plain_pickle, "MAX_CONTAINERS", 1000)
    monkeypatch.setattr("vramx.memory.snapshot_file.MAX_FILE_BYTES", 1 << 20)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TraceError, match=what):
        load_trace(tmp_path / name)


def accepted_opcode_by_opcode(data: bytes) -> bool | None:
    """Scan as _scan does, without its shortcut; None where an argument is damaged."""
    try:
        opcodes = list(pickletools.genops(data))
    except Exception:
        return None
    names = {opcode.name for opcode, _, _ in opcodes}
    puts = [(at, each) for opcode, each, at in opcodes if opcode.name in ("PUT", "LONG_BINPUT")]
    return names <= plain_pickle._PLAIN and all(index <= position for position, index in puts)


def accepted(data: bytes) -> bool:
    try:
        plain_pickle._scan(data)
    except Exception:
        return False
    return True


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pickletools, at damaged text
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_scan_in_runs_misses_nothing(protocol: int) -> None:
    records = [event("alloc", 0x7F00_0000_0000 + i, 1 << i, i) for i in range(40)]
    more = {"text": ["x" * length for length in range(20)], "numbers": [1.5, -1, 1 << 70, None]}
    data = pickle.dumps([records, more, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], protocol)
    assert accepted(data)
    rng = np.random.default_rng(protocol)
    verdicts = []
    calls = b"cRoibQ\x81\x82\x93"
    for attempt in range(800):
        changed = bytearray(data)
        byte = calls[attempt % len(calls)] if attempt % 2 else rng.integers(256)
        changed[rng.integers(len(data))] = byte
        expected = accepted_opcode_by_opcode(bytes(changed))
        if expected is not None:  # what is damaged is for the unpickler to refuse
            verdicts.append(expected)
            assert accepted(bytes(changed)) == expected
    assert verdicts.count(True) > 20
    assert verdicts.count(False) > 20


@pytest.mark.parametrize("packed", [False, True])
def test_a_snapshot_cut_anywhere_is_refused(snapshots: Path, tmp_path: Path, packed: bool) -> None:
    data = (snapshots / "train.pickle").read_bytes()
    data = gzip.compress(data) if packed else data
    path = tmp_path / "cut.pickle"
    for length in [1, 2, 3, 20, 1000, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(TraceError):
            load_trace(path)


def test_a_snapshot_with_changed_bytes_never_fails_otherwise(
    snapshots: Path, tmp_path: Path
) -> None:
    data = (snapshots / "train.pickle").read_bytes()[:60_000]
    path = tmp_path / "changed.pickle"
    for position in np.random.default_rng(0).integers(0, len(data), 60).tolist():
        changed = bytearray(data + b".")
        changed[position] ^= 0x55
        path.write_bytes(changed)
        with pytest.raises(TraceError) as caught:  # cut as well, so each must be refused
            load_trace(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("snapshot", "what"),
    [
        (17, "no torch memory snapshot"),
        ({"state_dict": {}}, "no torch memory snapshot"),
        ({"segments": [], "device_traces": {}}, "device_traces is dict, not a list"),
        ({"segments": [], "device_traces": [17]}, r"device_traces\[0\] is int, not a list"),
        ({"segments": [], "device_traces": [[]]}, "holds no events"),
        ([], "holds no events"),
        ({"segments": [], "device_traces": [[17]]}, "event 0 is int, not a dictionary"),
        ({"segments": [], "device_traces": [[{}]]}, "event 0 has no 'action'"),
        ({"segments": [], "device_traces": [[{"action": "alloc"}]]}, "event 0 has no 'addr'"),
        ({"segments": 17, "device_traces": [[event("alloc", 1, 1)]]}, "segments is int"),
        ({"segments": [17], "device_traces": [[event("alloc", 1, 1)]]}, "segment 0 is int"),
        ({"segments": [], "device_traces": [[event("snapshot", 1, 1)]]}, "no allocation or free"),
    ],
)
def test_other_data_is_refused(tmp_path: Path, snapshot: Any, what: str) -> None:
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    with pytest.raises(TraceError, match=what):
        load_trace(path)


@pytest.mark.parametrize("size", [-1, 1 << 64, 1.5, "1", None, True])
def test_a_size_that_is_no_size_is_refused(read: Any, size: Any) -> None:
    with pytest.raises(TraceError, match=r"event 1 has size .*; an integer from 0 to 2\^64 - 1"):
        read(event("alloc", 0x1000, 8), event("alloc", 0x2000, size))


def test_two_blocks_at_one_address_are_refused(read: Any) -> None:
    same = segment(block(0x1000, 512, 1))
    with pytest.raises(TraceError, match="second block at address 4096"):
        read(event("alloc", 0x9000, 8), segments=[same, same])
