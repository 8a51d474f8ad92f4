"""Reading trace files: the committed ones load, damaged ones say what is wrong with them."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import small_trace

from vramx.errors import TraceError
from vramx.memory.trace import load_trace

ARRAYS = {"op": "u1", "id": "u4", "size": "u8", "stream": "u1", "t": "u4"}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write the small trace with some arrays replaced, or left out where None."""

    def write_npz(**changes: Any) -> Path:
        arrays = {**small_trace(), **changes}
        path = tmp_path / "small.npz"
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
        return path

    return write_npz


def test_a_trace_cannot_be_changed(traces: Path) -> None:
    trace = load_trace(traces / "offload_streams.npz")
    with pytest.raises(ValueError, match="read-only"):
        trace.op[0] = 1


def test_version_1_is_accepted(write: Callable[..., Path]) -> None:
    assert len(load_trace(write(version=np.array(1)))) == 4


def test_what_is_saved_is_read_as_it_was_whatever_it_says(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    columns = {name: random.integers(0, 1 << 8, 4000) for name in ARRAYS}
    columns["op"] %= 4  # a kind that there is not among them, frees of ids that are not yet there
    columns["size"] = random.integers(0, 1 << 63, 4000) * 2 + 1
    for strange in (small_trace(), columns):
        arrays = {name: strange[name].astype(dtype) for name, dtype in ARRAYS.items()}
        trace = load_trace(write(**arrays))
        trace.save(tmp_path / "saved.npz")
        again = load_trace(tmp_path / "saved.npz").arrays()
        for name, array in arrays.items():
            assert again[name].dtype == array.dtype
            assert np.array_equal(again[name], array), name


def test_a_recorded_program_takes_three_bits_an_event(traces: Path, tmp_path: Path) -> None:
    trace = load_trace(traces / "lora_checkpoint.npz")
    trace.save(tmp_path / "saved.npz")
    assert (tmp_path / "saved.npz").stat().st_size < len(trace) * 3 / 8


def test_without_lzma_a_trace_is_saved_all_the_same(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = load_trace(write())
    trace.save(tmp_path / "packed.npz")
    monkeypatch.setattr(zipfile, "lzma", None)
    with pytest.raises(TraceError, match=r"cannot be unpacked: .*lzma"):
        load_trace(tmp_path / "packed.npz")
    trace.save(tmp_path / "saved.npz")
    assert load_trace(tmp_path / "saved.npz").size.tolist() == trace.size.tolist()


EMPTY = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
WRONG = [
    *(({name: None}, f"no array '{name}'") for name in ARRAYS),
    *(
        ({"version": np.array(version)}, r"of version .*; versions 1 and 2 are accepted")
        for version in (0, 3, [1, 1], 1.5, "1")
    ),
    *(
        ({"size": np.zeros(shape, dtype)}, r"array 'size' is .*; 1-D uint64 is accepted")
        for shape, dtype in ((4, "i8"), (4, "f8"), ((2, 2), "u8"), (4, ">u8"))
    ),
    ({"size": np.zeros(3, "u8")}, r"unequal lengths \(op 4, id 4, size 3, stream 4, t 4\)"),
    (EMPTY, "the trace is empty"),
]


@pytest.mark.parametrize(("changes", "what"), WRONG)
def test_what_is_wrong_with_an_array_is_named(
    write: Callable[..., Path], changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(TraceError, match=what):
        load_trace(write(**changes))


def test_pickled_objects_in_a_trace_are_not_loaded(write: Callable[..., Path]) -> None:
    with pytest.raises(TraceError, match="pickled Python objects, which are never loaded"):
        load_trace(write(op=np.array([_Trap(), 0, 0, 0], object)))


def test_a_trace_cut_anywhere_is_refused(traces: Path, tmp_path: Path) -> None:
    data = (traces / "offload_streams.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    for length in [0, 1, 2, 30, 1000, len(data) // 2, len(data) - 100, len(data) - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(TraceError):
            load_trace(cut)


def test_a_trace_with_changed_bytes_never_fails_otherwise(traces: Path, tmp_path: Path) -> None:
    data = bytearray((traces / "offload_streams.npz").read_bytes())
    path = tmp_path / "changed.npz"
    random = np.random.default_rng(0)
    refusals = []
    for position in random.integers(0, len(data), 200).tolist():
        changed = data.copy()
        changed[position] ^= 0x55
        path.write_bytes(changed)
        try:
            load_trace(path)
        except TraceError as error:
            refusals.append(str(error))
    assert len(refusals) > 150  # a checksum covers all but the archive's padding and file dates
    assert not [text for text in refusals if "\n" in text]


def test_an_array_that_claims_too_much_is_not_unpacked(tmp_path: Path) -> None:
    path, header = tmp_path / "bomb.npz", io.BytesIO()
    shape = {"descr": "|u1", "fortran_order": False, "shape": (1 << 50,)}
    np.lib.format.write_array_header_1_0(header, shape)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ARRAYS:
            archive.writestr(f"{name}.npy", header.getvalue())
    with pytest.raises(TraceError, match="damaged or cut short"):
        load_trace(path)


@pytest.mark.parametrize("content", [b"hello world\n", b"\x7fELF\x02\x01", b"\x00" * 100])
def test_other_files_are_refused_and_missing_ones_and_folders_told_apart(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "other.npz"
    with pytest.raises(TraceError, match="No such file"):
        load_trace(path)
    with pytest.raises(TraceError, match="it is a directory"):
        load_trace(tmp_path)
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"a trace \(\.npz\) or a torch snapshot is accepted"):
        load_trace(path)


class _Trap:
    """Fails the test if it is ever unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code in a trace was run",))


def test_the_trap_works() -> None:
    with pytest.raises(pytest.fail.Exception, match="was run"):
        pickle.loads(pickle.dumps(_Trap()))
