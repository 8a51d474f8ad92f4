"""The ways of keeping activations that benchmarks/fused.py compares, each on a model of its own.

A way is given a copy of a model that shares the parameters, so that many ways fit on one GPU and
none has to be undone. It changes the copy as its users would, and says how to run it. What Liger
replaces in a module of transformers is in place during its own steps only. Raises Skipped for what
cannot run here. Single-threaded. Costs milliseconds; what compiles does so on its first call.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import vramx
from benchmarks import fused
from benchmarks.models_workloads import Batch
from benchmarks.programs._report import sized

_ATEN = torch.ops.aten
# Their results are kept by selective checkpointing, of products every other one; torchtitan's list,
# but for collectives (torchtitan/distributed/activation_checkpoint.py, "op" selective option).
_ATTENTION = {
    getattr(_ATEN, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(_ATEN, name)
}
_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default}


class SkippedError(Exception):
    """A way cannot run on this machine; the text says what it needs."""


@dataclass(frozen=True)
class Subject:
    """A model that one way has to itself, and how to run it.

    Attributes:
        blocks: its repeated blocks.
        forward: makes the result of a batch, given the model or what was compiled of it.
        around: what each step, forward and backward, runs in.
    """

    model: Any
    blocks: tuple[nn.Module, ...]
    forward: Callable[[Any, Batch], Tensor]
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def run(self, batch: Batch) -> Tensor:
        return self.forward(self.model, batch)


Way = Callable[[Subject], Subject]


def eager(subject: Subject) -> Subject:
    return subject


def optimised(subject: Subject, level: str, **options: Any) -> Subject:
    """Have vramx.optimize swap the blocks; fewer than all of them would be another figure."""
    report = vramx.optimize(subject.model, level, **options)
    swapped = {row.name for row in report.swapped}
    missed = [name for name, module in _named(subject) if name not in swapped]
    if missed:
        reasons = {row.name: row.reason for row in report.left}
        raise SkippedError(f"{missed[0]} is not swapped: {reasons.get(missed[0], 'unknown')}")
    return subject


def _named(subject: Subject) -> Iterator[tuple[str, nn.Module]]:
    blocks = {id(block) for block in subject.blocks}
    return ((name, m) for name, m in subject.model.named_modules() if id(m) in blocks)


def checkpointed(subject: Subject, **options: Any) -> Subject:
    """Recompute every block, as torch.utils.checkpoint does."""
    for block in subject.blocks:
        call = partial(checkpoint, block.forward, use_reentrant=False, **options)
        block.forward = call
    return subject


def selective_contexts() -> Any:
    """Return the contexts of one block that keep attention and every other matrix product."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_kept = operation in _ATTENTION
        if operation in _PRODUCTS:
            seen[context.is_recompute] += 1
            is_kept = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compiled(subject: Subject, budget: float | None = None) -> Subject:
    """Have torch.compile make one graph of the model, within a share of its activations' bytes."""
    # On a processor, the same partition of the graph and no code generated.
    name = sized("inductor", "aot_eager_decomp_partition")
    backend: Any = name if budget is None else _within(budget, name)
    return replace(subject, model=torch.compile(subject.model, backend=backend))


def _within(budget: float, name: str) -> Callable[..., Any]:
    """Return a backend under a memory budget, which dynamo does not take for that of another."""
    import torch._dynamo
    import torch._functorch.config

    backend = torch._dynamo.lookup_backend(name)

    def compile_within(graph: Any, inputs: Any, **options: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return backend(graph, inputs, **options)

    return compile_within


def liger(subject: Subject) -> Subject:
    """Have Liger replace norms, rotary embedding and gated units, as its users do.

    Raises:
        SkippedError: it is not installed, or there is no GPU for its kernels.
    """
    try:
        kernels: Any = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise SkippedError(f"Liger cannot be imported: {error}") from None
    if not torch.cuda.is_available():
        raise SkippedError("Liger's kernels need a GPU")
    source: Any = vars(sys.modules["transformers.models.llama.modeling_llama"])
    before = dict(source)
    kernels.apply_liger_kernel_to_llama(
        cross_entropy=False, fused_linear_cross_entropy=False, model=subject.model
    )
    changed = {name: value for name, value in source.items() if before.get(name) is not value}
    originals = {name: before[name] for name in changed if name in before}
    source.update(originals)
    return replace(subject, around=lambda: _replaced(source, changed, originals))


@contextmanager
def _replaced(
    names: dict[str, Any], changed: dict[str, Any], originals: dict[str, Any]
) -> Iterator[None]:
    names.update(changed)
    try:
        yield
    finally:
        names.update(originals)


def liger_checkpointed(subject: Subject) -> Subject:
    return checkpointed(liger(subject))


# By their names in benchmarks/fused.py; a level, but for one.
OURS: dict[str, Way] = {
    **{name: partial(optimised, level=name) for name in fused.OURS},
    "int8_nearest": partial(optimised, level="int8", rounding="nearest"),
}
# The slow to compile come last: they are what is left out if time runs short.
WAYS: dict[str, Way] = {
    "eager": eager,
    **OURS,
    "liger": liger,
    "liger_checkpoint": liger_checkpointed,
    "checkpoint": checkpointed,
    "selective_checkpoint": partial(checkpointed, context_fn=selective_contexts),
    "compile": compiled,
    "compile_budget_0.5": partial(compiled, budget=0.5),
    "compile_budget_0.25": partial(compiled, budget=0.25),
}
COMPILED = frozenset(name for name in WAYS if name.startswith("compile"))
