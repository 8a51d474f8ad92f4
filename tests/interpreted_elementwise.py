"""Public functions of vramx.nn in a process where Triton interprets: there the kernels serve a CPU.

Triton decides when it is imported whether it interprets, so a test's own process cannot. The child
answers pickled calls: it runs a function forward and backward, with all generators at fixed seeds,
and sends the result, the gradients and the packed buffers back. evaluate() does the same in the
test's process, where the composite serves. About two seconds to start, and 10 us an element.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROOT = Path(__file__).resolve().parent.parent
SEED = 11


class Evaluated(NamedTuple):
    """What a function gave: its result, the gradients of its inputs, the buffers that it kept."""

    result: Tensor
    gradients: list[Tensor | None]
    packs: list[Tensor]


def evaluate(
    name: str, inputs: Sequence[Tensor], incoming: Tensor, options: Mapping[str, Any]
) -> Evaluated:
    """Run a function such as "glu.swiglu" of floating inputs, and backward from `incoming`."""
    from vramx.compression import random

    module, _, function = name.rpartition(".")
    call = getattr(importlib.import_module(f"vramx.nn.{module}"), function)
    random.manual_seed(SEED, rank=0)
    torch.manual_seed(SEED)
    leaves = [
        each.detach().clone().requires_grad_() if each.is_floating_point() else each
        for each in inputs
    ]
    packs: list[Tensor] = []

    def watch(saved: Tensor) -> Tensor:
        if saved.dtype == torch.uint8:
            packs.append(saved.clone())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(watch, lambda saved: saved):
        result = call(*leaves, **options)
    result.backward(incoming)
    return Evaluated(result.detach(), [each.grad for each in leaves], packs)


class InterpretedFunctions:
    """evaluate() of a child; one caller at a time."""

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

    def __call__(
        self,
        name: str,
        inputs: Sequence[Tensor],
        incoming: Tensor,
        options: Mapping[str, Any],
        defect: str = "",
    ) -> Evaluated:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        pickle.dump((name, list(inputs), incoming, dict(options), defect), self._child.stdin)
        self._child.stdin.flush()
        failed, result = pickle.load(self._child.stdout)
        if failed:
            raise RuntimeError(result)
        return Evaluated(*result)


@contextmanager
def _planted(defect: str) -> Any:
    """Replace a device function by a wrong one: an error that a look at values would not show."""
    if not defect:
        yield
        return
    import elementwise_kernels_defects as defects

    module, name, wrong = defects.DEFECTS[defect]
    right = getattr(module, name)
    setattr(module, name, wrong)
    try:
        yield
    finally:
        setattr(module, name, right)


@contextmanager
def _poisoned_memory() -> Any:
    """Give new tensors NaN and 0xAB instead of whatever the memory held: what is not written shows.

    torch does so itself under deterministic algorithms, with NaN and the largest integer.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _serve() -> None:
    """The child's life: no result but pickles goes to stdout."""
    import warnings

    warnings.simplefilter("ignore")  # numpy speaks up at every NaN and overflow
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            name, inputs, incoming, options, defect = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            with _planted(defect), _poisoned_memory():
                answer = (False, tuple(evaluate(name, inputs, incoming, options)))
        except Exception as error:
            answer = (True, f"{type(error).__name__}: {error}")
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    _serve()
