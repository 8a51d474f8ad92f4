"""Differentiate every operation that torch's own tests know, with compression and without.

Run as a program, by test_compress_policy.py: importing torch.testing._internal changes settings
of the whole process. Prints one JSON object: for each operation that packed something, the largest
error of a gradient and whether one lost its finite values; and how many operations were run. Those
that are named as arguments are run once more, packed as if the backward of all were smooth.
"""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from vramx.compression.hooks import CompressionContext, compress
from vramx.compression.policy import exactness, plans

# More samples of an operation are mostly other shapes.
_SAMPLES = 4
_FEW = 8
_TINY = torch.finfo(torch.float32).tiny


def operations() -> Iterator[Any]:
    """Yield the operations that are differentiable for float32 on the host."""
    # Only helpers for expected texts need this module, and many installations lack it.
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    # For each sample torch looks for a unittest on the stack, which takes longer than all the rest.
    inspect.stack = lambda context=1: []
    # Of each seed the GPUs that are not there would keep the text of the stack for later.
    torch.manual_seed = torch.default_generator.manual_seed

    for operation in op_db:
        if operation.supports_autograd and torch.float32 in operation.supported_dtypes("cpu"):
            yield operation


class Run:
    """A call of an operation on one sample: its results, and the leaves they depend on."""

    def __init__(self, operation: Any, sample: Any, context: CompressionContext) -> None:
        self.leaves: list[torch.Tensor] = []
        arguments = tree_map(self._no_leaf, (sample.input, sample.args, sample.kwargs))
        torch.default_generator.manual_seed(0)
        with context:
            results = operation(arguments[0], *arguments[1], **arguments[2])
        self.results = [
            t
            for t in tree_leaves(results)
            if isinstance(t, torch.Tensor)
            and t.requires_grad
            and t.dtype == torch.float32
            and t.layout == torch.strided
        ]

    def _no_leaf(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        leaf = value.detach().clone().requires_grad_()
        self.leaves.append(leaf)
        return leaf * 1.0

    def gradients(self) -> tuple[list[torch.Tensor], float]:
        """Return the gradients, and the norm of what backward starts with."""
        torch.default_generator.manual_seed(1)
        weights = [torch.randn_like(t) for t in self.results]
        found = torch.autograd.grad(self.results, self.leaves, weights, allow_unused=True)
        norm = float(torch.stack([w.norm() for w in weights]).norm())
        return [g for g in found if g is not None and g.layout == torch.strided], norm


def compare(operation: Any, sample: Any, exact: Run) -> tuple[float, bool] | None:
    """Return the largest error, and whether finite values were lost; None if nothing is packed."""
    context = compress(min_bytes=1, deterministic=True)
    run = Run(operation, sample, context)
    if context.stats.packed.tensors == 0:
        return None
    expected, norm = exact.gradients()
    try:
        found, _ = run.gradients()
    except RuntimeError:
        return sys.float_info.max, True  # an index that was packed is out of range
    if len(context.stats.operations) > 1:
        norm = sys.float_info.max  # a program, which may enlarge errors: only its values count
    error, lost = 0.0, False
    for one, other in zip(found, expected, strict=True):
        finite = other.isfinite()
        lost = lost or not bool(one[finite].isfinite().all())
        # Where terms of backward cancel, as in a norm over one element, the gradient has no scale.
        scale = max(float(other[finite].norm()), norm, _TINY)
        error = max(error, float((one - other)[finite].nan_to_num().norm()) / scale)
    return error, lost


def is_degenerate(operation: Any, sample: Any) -> bool:
    """Whether a norm is over so few elements that their deviation may be as small as epsilon."""
    return "norm" in operation.name and torch.as_tensor(sample.input).numel() < _FEW


def exact_runs(operation: Any) -> list[tuple[Any, Run]]:
    """Return samples and their runs without compression; none where torch does not differentiate.

    Such are operations without a derivative for one of the arguments, or that need what is not
    installed.
    """
    torch.default_generator.manual_seed(0)
    try:
        found = operation.sample_inputs("cpu", torch.float32, requires_grad=False)
        samples = list(itertools.islice(found, _SAMPLES))
        runs = [(sample, Run(operation, sample, compress(level="keep"))) for sample in samples]
    except (RuntimeError, NotImplementedError):
        return []
    return [(sample, run) for sample, run in runs if run.results]


def answers(names: set[str]) -> tuple[int, dict[str, tuple[float, bool]]]:
    """Return how many operations were run, of these or of all, and what was packed."""
    counted = 0
    packed: dict[str, tuple[float, bool]] = {}
    for operation in operations():
        name = ".".join(filter(None, (operation.name, operation.variant_test_name)))
        if names and name not in names:
            continue
        runs = [(s, run) for s, run in exact_runs(operation) if not is_degenerate(operation, s)]
        found = [compare(operation, *run) for run in runs]
        counted += bool(found)
        if told := [answer for answer in found if answer is not None]:
            packed[name] = max(e for e, _ in told), any(lost for _, lost in told)
    return counted, packed


def main() -> None:
    warnings.simplefilter("ignore")
    counted, packed = answers(set())
    exactness.needs_exact = lambda *_: False
    plans.plans_of.cache_clear()
    _, forced = answers(set(sys.argv[1:]))
    print(json.dumps({"operations": counted, "packed": packed, "forced": forced}))


if __name__ == "__main__":
    main()
