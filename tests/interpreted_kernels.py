"""The kernels of vramx/kernels in Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets, so the tests' own process cannot do both
that and compile. The child reads pickled calls from stdin and writes pickled results to stdout; it
takes about two seconds to start, and a call about 10 us an element. Every output is poisoned and
lies between guard bytes, which are checked here. One child, one caller at a time.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vramx.kernels.launch import Function
from vramx.kernels.layout import Layout

POISON = 0xAB
_GUARD_BYTES = 64
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Noise:
    """Where stochastic rounding gets its noise: the launcher's two arguments."""

    seed: int = -123456789012345
    epoch: int = 3
    stream: int = 2**31 + 5

    def state(self) -> Tensor:
        return torch.tensor([self.seed, self.epoch])


class InterpretedKernels:
    """The launchers, as functions that return what they wrote."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._child = subprocess.Popen(
            [sys.executable, __file__],
            cwd=_ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=60)

    def quantize(
        self, flat: Tensor, layout: Layout, noise: Noise | None = None, defect: str = ""
    ) -> Tensor:
        guarded = self._call("quantize", flat, layout, noise, defect=defect)
        return _inner(guarded, layout.buffer_bytes)

    def dequantize(
        self, buffer: Tensor, layout: Layout, dtype: torch.dtype, defect: str = ""
    ) -> Tensor:
        guarded = self._call("dequantize", buffer, layout, dtype, defect=defect)
        return _inner(guarded, layout.numel * dtype.itemsize).view(dtype)

    def quantize_map(
        self,
        flat: Tensor,
        layout: Layout,
        function: Function,
        noise: Noise | None = None,
        defect: str = "",
    ) -> Tensor:
        guarded = self._call("quantize_map", flat, layout, function, noise, defect=defect)
        return _inner(guarded, layout.buffer_bytes)

    def dequantize_map(
        self,
        buffer: Tensor,
        layout: Layout,
        function: Function,
        dtype: torch.dtype,
        defect: str = "",
    ) -> Tensor:
        guarded = self._call("dequantize_map", buffer, layout, function, dtype, defect=defect)
        return _inner(guarded, layout.numel * dtype.itemsize).view(dtype)

    def pack_signs(self, flat: Tensor) -> Tensor:
        return _inner(self._call("pack_signs", flat), mask_bytes(flat.numel()))

    def unpack_signs(self, buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        guarded = self._call("unpack_signs", buffer, numel, dtype)
        return _inner(guarded, numel * dtype.itemsize).view(dtype)

    def pack_mask(self, flags: Tensor) -> Tensor:
        return _inner(self._call("pack_mask", flags), mask_bytes(flags.numel()))

    def unpack_mask(self, buffer: Tensor, numel: int) -> Tensor:
        return _inner(self._call("unpack_mask", buffer, numel), numel)

    def noise(self, block: int, rows: int, cols: int, noise: Noise) -> Tensor:
        """The noise of a tile whose first 8 elements have this number; rows follow each other."""
        return self._call("noise", block, rows, cols, noise)

    def supported(self, device: str) -> bool:
        return self._call("supported", device)

    def _call(self, name: str, *arguments: Any, defect: str = "") -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        pickle.dump((name, arguments, defect), self._child.stdin)
        self._child.stdin.flush()
        failed, result = pickle.load(self._child.stdout)
        if failed:
            raise RuntimeError(result)
        return result


@pytest.fixture(scope="module")
def kernels() -> Iterator[InterpretedKernels]:
    """A file names it in `__all__`."""
    made = InterpretedKernels()
    yield made
    made.close()


def mask_bytes(numel: int) -> int:
    return Layout(numel, bits=1, group_size=128, symmetric=True).code_bytes


def _poisoned(size_bytes: int) -> Tensor:
    return torch.full((size_bytes + 2 * _GUARD_BYTES,), POISON, dtype=torch.uint8)


def _inner(guarded: Tensor, size_bytes: int) -> Tensor:
    """Return what lies between the guards; fail if a guard was written."""
    before, inner, after = guarded.split([_GUARD_BYTES, size_bytes, _GUARD_BYTES])
    assert (before == POISON).all(), "written in front of the output"
    assert (after == POISON).all(), "written behind the output"
    return inner.clone()


def _serve() -> None:
    """The child's life: no result but pickles goes to stdout."""
    import warnings

    from interpreted_kernels_child import CALLS, planted
    from quick_interpreter import quicken

    quicken()
    warnings.simplefilter("ignore")  # numpy speaks up at every NaN and overflow
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            name, arguments, defect = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            with planted(defect):
                answer = (False, CALLS[name](*arguments))
        except Exception as error:
            answer = (True, f"{type(error).__name__}: {error}")
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    # Pickles name this module as the tests import it.
    from interpreted_kernels import _serve as serve

    serve()
