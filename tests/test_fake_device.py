"""What torch's C++ is told of a GPU that is not there: it is exchanged, and put back."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

import vramx
from vramx.errors import UntraceableError
from vramx.planning import fake_device

GUARD = "c10/core/impl/DeviceGuardImplInterface.h"
HOOKS = "ATen/detail/AcceleratorHooksInterface.h"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class Stream(ctypes.Structure):
    """c10::Stream."""

    _fields_ = (("type", ctypes.c_int8), ("index", ctypes.c_int8), ("number", ctypes.c_int64))


def registered() -> int | None:
    """Return the guard for CUDA."""
    library = ctypes.CDLL(str(fake_device._TORCH / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * fake_device._TYPES).in_dll(library, fake_device._REGISTRY)
    found: int | None = registry[fake_device._CUDA_TYPE]
    return found


@pytest.mark.parametrize(
    ("header", "code"), [(GUARD, fake_device._OF_GUARD), (HOOKS, fake_device._OF_HOOKS)]
)
def test_the_installed_headers_have_what_is_exchanged(header: str, code: dict[str, bytes]) -> None:
    names = fake_device._functions(header)
    assert set(code) <= set(names)
    text = (fake_device._TORCH / "include" / header).read_text()
    for name in code:
        assert re.search(rf"virtual\s+[\w:]+\s+{name}\(", text)


def test_a_function_is_exchanged_in_a_copy() -> None:
    """The copy's own functions answer; the others are the original's, as it is itself."""
    original = (ctypes.c_void_p * 6)(1, 2, 3, 4, 5, 6)
    names = ["kept", "getStream", "hasPrimaryContext", "record"]
    code = {
        "getStream": fake_device._STREAM,
        "hasPrimaryContext": fake_device._TRUE,
        "record": fake_device._NOTHING,
    }
    at = ctypes.addressof(original) + 2 * fake_device._WORD
    table = fake_device._Table(at, names, code)
    words = (ctypes.c_void_p * 6).from_address(table.address - 2 * fake_device._WORD)
    assert list(words)[:3] == [1, 2, 3]
    assert list(original) == [1, 2, 3, 4, 5, 6]
    stream = ctypes.CFUNCTYPE(Stream, ctypes.c_void_p, ctypes.c_int16)(words[3])(None, -1)
    assert (stream.type, stream.index, stream.number) == (1, 0, 0)
    assert ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(words[4])(None, 0)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(words[5])(None)


@no_gpu
def test_everything_is_put_back() -> None:
    before = registered()
    with fake_device.guarded():
        assert registered() not in (before, None)
    assert registered() == before
    with pytest.raises(KeyError), fake_device.guarded():
        raise KeyError
    assert registered() == before


@no_gpu
def test_a_build_without_what_is_exchanged_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = registered()
    with monkeypatch.context() as patch:
        patch.setattr(fake_device, "_REGISTRY", "nothing_of_this_name")
        with pytest.raises(UntraceableError, match=r"predict on Linux, or with device='cpu'"):
            vramx.predict(lambda: None)
    assert registered() == before
