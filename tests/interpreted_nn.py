"""vramx.nn in a process where Triton interprets: there the kernels serve a CPU.

Triton decides when it is imported whether it interprets, so a test's own process cannot. The child
answers pickled calls: a function of vramx.nn is run forward and backward, and the result, the
gradients and the packed buffers come back (evaluate() does the same in the test's process, where
the composite serves); an operator of torch.ops.vramx, a launcher of the codec's kernels (see
interpreted_kernels.py) or a function of loss_kernels_in_pieces.py is run as it is. All generators
start at fixed seeds in each call, fresh memory is poisoned, and a defect replaces a device function
by a wrong one for one call. One child for all tests of a process, one caller at a time: about two
seconds to start, and 10 us an element.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
    """Run a function such as "glu.swiglu" of floating inputs, and backward from `incoming`.

    Of several results the first counts.
    """
    from vramx.compression.codec import random

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
        results = call(*leaves, **options)
    result = results[0] if isinstance(results, tuple) else results
    result.backward(incoming)
    return Evaluated(result.detach(), [each.grad for each in leaves], packs)


def call_operator(name: str, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run an operator and return its results as contiguous tensors."""
    import vramx.nn.feed_forward  # noqa: F401 - registers the operators
    from vramx.compression.codec import random

    random.manual_seed(0, rank=0)
    result = getattr(torch.ops.vramx, name)(*arguments)
    results = (result,) if isinstance(result, Tensor) else result
    return tuple(tensor.contiguous() for tensor in results)


def call_loss_in_pieces(name: str, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run a function of loss_kernels_in_pieces.py, which needs Triton's interpreter."""
    import loss_kernels_in_pieces

    return tuple(getattr(loss_kernels_in_pieces, name)(*arguments))


def call_in_place(path: str, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run a function of vramx, and return the tensors among its arguments as it leaves them."""
    module, _, function = path.rpartition(".")
    getattr(importlib.import_module(f"vramx.{module}"), function)(*arguments)
    return tuple(each for each in tree_leaves(arguments) if isinstance(each, Tensor))


def call_step(model: nn.Module, x: Tensor, incoming: Tensor) -> tuple[Tensor | None, ...]:
    """Swap a model's blocks, and return the gradients of its input and of its parameters."""
    import vramx

    assert vramx.optimize(model, "keep").swapped
    model(x.requires_grad_()).backward(incoming)
    return (x.grad, *(parameter.grad for parameter in model.parameters()))


def call_kernel(name: str, arguments: Sequence[Any], noise: dict[str, Any]) -> tuple[Any]:
    """Run a function of called_kernels.py, which needs Triton's interpreter."""
    import called_kernels

    return (getattr(called_kernels, name)(*arguments, **noise),)


class Interpreted:
    """The child."""

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

    def function(self, *call: Any, defect: str = "") -> Evaluated:
        """Return what evaluate() does there."""
        return Evaluated(*self._ask(evaluate.__name__, call, defect))

    def operator(self, name: str, *arguments: Any, defect: str = "") -> tuple[Tensor, ...]:
        """Return what call_operator() does there."""
        return tuple(self._ask(call_operator.__name__, (name, arguments), defect))

    def loss_in_pieces(self, name: str, *arguments: Any, defect: str = "") -> tuple[Tensor, ...]:
        """Return what call_loss_in_pieces() does there."""
        return tuple(self._ask(call_loss_in_pieces.__name__, (name, arguments), defect))

    def in_place(self, path: str, *arguments: Any, defect: str = "") -> tuple[Tensor, ...]:
        """Return what call_in_place() does there."""
        return tuple(self._ask(call_in_place.__name__, (path, arguments), defect))

    def step(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return what call_step() does there."""
        return tuple(self._ask(call_step.__name__, arguments, ""))

    def kernel(self, name: str, *arguments: Any, defect: str = "", **noise: Any) -> Any:
        """Return what call_kernel() does there."""
        return self._ask(call_kernel.__name__, (name, arguments, noise), defect)[0]

    def _ask(self, what: str, arguments: tuple[Any, ...], defect: str) -> tuple[Any, ...]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        pickle.dump((what, arguments, defect), self._child.stdin)
        self._child.stdin.flush()
        failed, result = pickle.load(self._child.stdout)
        if failed:
            raise RuntimeError(result)
        return tuple(result)


def interpreted_nn() -> Interpreted:
    """Return the child; skip where vramx.nn leaves to plain torch what its kernels are for."""
    from vramx.kernels import start
    from vramx.nn import keeping

    child = interpreter()
    if start.triton_version() < keeping.OLDEST_TRITON:
        pytest.skip("triton before 3.3 has no kernels of vramx.nn: plain torch does what they do")
    return child


@lru_cache(maxsize=1)
def interpreter() -> Interpreted:
    """Return the one child of this process, which ends with it; skip where there is no triton."""
    pytest.importorskip("triton")
    child = Interpreted()
    atexit.register(child.close)
    return child


@contextmanager
def _planted(defect: str) -> Iterator[None]:
    """Replace a device function by a wrong one: an error that a look at values would not show."""
    if not defect:
        yield
        return
    import defective_kernels
    import defective_nn_kernels

    modules, name, wrong = (defective_kernels.DEFECTS | defective_nn_kernels.DEFECTS)[defect]
    with ExitStack() as stack:
        for module in modules if isinstance(modules, tuple) else (modules,):
            stack.enter_context(patch.object(module, name, wrong))
        yield


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Give new tensors NaN and 0xAB instead of whatever the memory held: what is not written shows.

    torch does so itself under deterministic algorithms, with NaN and the largest integer.
    """
    # Where use_deterministic_algorithms() would import inductor, two seconds.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def _serve() -> None:
    """The child's life: no result but pickles goes to stdout."""
    import warnings

    from quick_interpreter import quicken

    from vramx.kernels import norm_backward_launch

    quicken()
    # A program takes a few milliseconds here, however many columns it adds up.
    norm_backward_launch._SUM_COLUMNS = 256
    warnings.simplefilter("ignore")  # numpy speaks up at every NaN and overflow
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            what, arguments, defect = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            with _planted(defect), _poisoned_memory():
                answer = (False, tuple(globals()[what](*arguments)))
        except Exception as error:
            answer = (True, f"{type(error).__name__}: {error}")
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    _serve()
