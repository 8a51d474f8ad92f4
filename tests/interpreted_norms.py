"""The operators of the norms on their kernels in Triton's interpreter, in a process of its own.

As interpreted_kernels.py, whose child knows other calls. In the child fresh memory is poisoned: NaN
in floats, the largest number in bytes. A defect replaces one device function by a wrong one for the
time of a call. One child, one caller at a time.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent


class InterpretedNorms:
    """`torch.ops.vramx` as it runs where there are kernels; each call seeds the noise anew."""

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

    def __call__(self, operator: str, *arguments: Any, defect: str = "") -> Any:
        """Return the operator's result as contiguous tensors."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        pickle.dump((operator, arguments, defect), self._child.stdin)
        self._child.stdin.flush()
        failed, result = pickle.load(self._child.stdout)
        if failed:
            raise RuntimeError(result)
        return result


@contextmanager
def _planted(defect: str) -> Iterator[None]:
    if not defect:
        yield
        return
    from defective_norm_kernels import DEFECTS

    module, name, wrong = DEFECTS[defect]
    right = getattr(module, name)
    setattr(module, name, wrong)
    try:
        yield
    finally:
        setattr(module, name, right)


def _call(operator: str, arguments: tuple[Any, ...]) -> Any:
    import torch

    from vramx.compression import random

    random.manual_seed(0, rank=0)
    result = getattr(torch.ops.vramx, operator)(*arguments)
    results = result if isinstance(result, tuple) else (result,)
    return tuple(tensor.contiguous() for tensor in results)


def _serve() -> None:
    """The child's life: no result but pickles goes to stdout."""
    import warnings

    import torch

    from vramx.nn import linear, operators_norm  # noqa: F401 - registers the operators

    warnings.simplefilter("ignore")  # numpy speaks up at every NaN and overflow
    torch.use_deterministic_algorithms(True)  # fills what empty() returns
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            operator, arguments, defect = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            with _planted(defect):
                answer = (False, _call(operator, arguments))
        except Exception as error:
            answer = (True, f"{type(error).__name__}: {error}")
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    _serve()
