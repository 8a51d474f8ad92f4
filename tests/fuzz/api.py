"""The public API of vramx as programs use it, and what stands for it in the run without.

This is the one place of the fuzz that knows the names of vramx.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import vramx
from tests.fuzz.pieces import Decorated, Recomputed
from tests.fuzz.settings import Setting


class Plain:
    """Nothing is packed and nothing is recomputed but by torch itself."""

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def exact(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a part of a program that opts out."""
        return contextlib.nullcontext()

    def graphs(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context around the call of a compiled region."""
        return contextlib.nullcontext()

    def prepare(self, program: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the call of a program."""
        return program.__call__

    def seed(self, seed: int) -> None:
        """Have the noise of packing repeat."""

    def undo(self, program: nn.Module) -> None:
        """Have the program be what it was."""


class Packed(Plain):
    """Packs as the setting says."""

    def __init__(self, setting: Setting) -> None:
        self.stats: Any = None
        self._style = setting.style
        self._options = vramx.Compression(**setting.options)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return vramx.checkpoint(function, *args, level=self._options, **kwargs)

    def exact(self) -> contextlib.AbstractContextManager[Any]:
        return vramx.compress(level="keep")

    def graphs(self) -> contextlib.AbstractContextManager[Any]:
        return vramx.compressed_graphs(self._options)

    def prepare(self, program: nn.Module) -> Callable[[Tensor], Tensor]:
        if any(isinstance(part, Recomputed) for part in program.modules()):
            vramx.checkpoint_modules(program, where=Recomputed, level=self._options)
        for part in list(program.modules()):
            if isinstance(part, Decorated):
                vramx.compressed_activations(level=self._options)(part)
        call = super().prepare(program)
        if self._style == "module":
            vramx.compressed_activations(level=self._options)(program)
            self.stats = vramx.compression_stats(program)
        elif self._style == "function":
            call = vramx.compressed_activations(level=self._options)(call)
            self.stats = vramx.compression_stats(call)
        elif self._style == "context":
            context = vramx.compress(self._options)
            self.stats = context.stats
            return lambda x: _within(context, program, x)
        return call

    def seed(self, seed: int) -> None:
        vramx.manual_seed(seed)

    def undo(self, program: nn.Module) -> None:
        vramx.restore(program)


def _within(context: Any, program: nn.Module, x: Tensor) -> Any:
    with context:
        return program(x)
