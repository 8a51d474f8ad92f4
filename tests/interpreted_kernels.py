"""The kernels of vramx/kernels in Triton's interpreter, in the child of interpreted_nn.py.

Every output is poisoned and lies between guard bytes, which are checked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from interpreted_nn import interpreter
from torch import Tensor

from vramx.kernels.launch import Function
from vramx.kernels.layout import Layout

POISON = 0xAB
GUARD_BYTES = 64
Type = torch.dtype


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

    def quantize(
        self, flat: Tensor, layout: Layout, noise: Noise | None = None, defect: str = ""
    ) -> Tensor:
        return self._packed("quantize", flat, layout, noise, defect)

    def quantize_map(
        self, flat: Tensor, layout: Layout, function: Function, noise: Noise | None = None,
        defect: str = "",
    ) -> Tensor:  # fmt: skip
        return self._packed("quantize_map", flat, layout, noise, defect, function)

    def dequantize(self, buffer: Tensor, layout: Layout, dtype: Type, defect: str = "") -> Tensor:
        return self._run("dequantize", buffer, layout.numel, dtype, layout, defect=defect)

    def dequantize_map(
        self, buffer: Tensor, layout: Layout, function: Function, dtype: Type
    ) -> Tensor:
        return self._run("dequantize_map", buffer, layout.numel, dtype, layout, function)

    def pack_signs(self, flat: Tensor) -> Tensor:
        return self._run("pack_signs", flat, mask_bytes(flat.numel()), torch.uint8)

    def unpack_signs(self, buffer: Tensor, numel: int, dtype: Type) -> Tensor:
        return self._run("unpack_signs", buffer, numel, dtype)

    def pack_mask(self, flags: Tensor) -> Tensor:
        return self._run("pack_mask", flags, mask_bytes(flags.numel()), torch.uint8)

    def unpack_mask(self, buffer: Tensor, numel: int) -> Tensor:
        return self._run("unpack_mask", buffer, numel, torch.bool).view(torch.uint8)

    def noise(self, block: int, rows: int, cols: int, noise: Noise) -> Tensor:
        """The noise of a tile whose first 8 elements have this number; rows follow each other."""
        return interpreter().kernel("noise", block, rows, cols, noise)

    def supported(self, device: str) -> bool:
        return interpreter().kernel("supported", device)

    def _packed(
        self, name: str, flat: Tensor, layout: Layout, noise: Noise | None, defect: str,
        *function: Function,
    ) -> Tensor:  # fmt: skip
        drawn = {"noise": noise and noise.state(), "stream": noise.stream if noise else 0}
        size = layout.buffer_bytes
        return self._run(name, flat, size, torch.uint8, layout, *function, defect=defect, **drawn)

    def _run(
        self, name: str, read: Tensor, numel: int, dtype: Type, *others: Any, defect: str = "",
        **noise: Any,
    ) -> Tensor:  # fmt: skip
        """Return what lies between the guards; fail if a guard was written."""
        size = numel * dtype.itemsize
        given = name, read, size, dtype, *others
        guarded = interpreter().kernel("run", *given, defect=defect, **noise)
        before, inner, after = guarded.split([GUARD_BYTES, size, GUARD_BYTES])
        assert (before == POISON).all(), "written in front of the output"
        assert (after == POISON).all(), "written behind the output"
        return inner.clone().view(dtype)


def mask_bytes(numel: int) -> int:
    return Layout(numel, bits=1, group_size=128, symmetric=True).code_bytes


kernels = InterpretedKernels()
