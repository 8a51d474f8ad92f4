"""The process that benchmarks/train_3b.py starts: it trains one model under a limit, in one way.

    python _train_3b.py ROW

Prints one line of JSON for each figure, or one with a status where memory ran out. All of what is
trained is as a user would have it: transformers' model with its own loss, and one call of vramx or
of Liger and transformers.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vramx
from benchmarks.models_configs import llama_config
from benchmarks.programs._longest import Tried, next_length
from benchmarks.programs._report import SEED, Recorder, report, report_status, sized, synchronize
from benchmarks.programs._window import windowed
from benchmarks.train_3b import RECOMPUTED, ROWS, Row
from vramx.sizes import GIB

# Vocabulary and sizes: 3.015 billion parameters, and those of Llama 3.1 8B.
_TINY = (300, (64, 4, 128, 4, 2))
SHAPES = {
    "3b": sized((32_000, (3072, 28, 8192, 24, 8)), _TINY),
    "8b": sized((128_256, (4096, 32, 14_336, 32, 8)), _TINY),
    "10b": sized((32_000, (4096, 47, 14_336, 32, 8)), _TINY),  # 10.5 B, of 24 GiB 20 for weights
}
BATCH = sized((16, 512), (2, 32))
WARM_UP, TIMED = sized((6, 10), (1, 2), quick=(3, 3))
# Of the longest sequence: the first that is tried and the longest. No step is begun that should
# take longer; its time grows with the square of the length, with a window in proportion.
SHORTEST, LONGEST, LONGEST_STEP_MS = sized((32_768, 1 << 21, 330_000.0), (64, 128, 150_000.0))
RATE = 1e-5
# As language models are trained. At 0.999 second moments of 8 bits never shrink: what a step
# takes from their roots is 0.05 %, less than half of what 8 bits can tell.
BETAS = (0.9, 0.95)


def main(name: str) -> None:
    row = ROWS[name]
    recorder = Recorder(deterministic=False)
    import transformers  # noqa: F401  ahead of the turn: it takes seconds

    device = recorder.begin()
    limit_bytes = int(row.limit_gib * GIB)
    window: AbstractContextManager[None] = contextlib.nullcontext()
    if row.window > 0 and device.type == "cuda":
        window = windowed(row.window, of_blocks=row.way == RECOMPUTED)
    if device.type == "cuda":
        share = limit_bytes / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    try:
        with window:
            (lengthen if row.grows else train)(name, row, device, limit_bytes)
    except torch.OutOfMemoryError:
        traceback.print_exc()
        report_status(name, "out of memory")


def train(name: str, row: Row, device: torch.device, limit_bytes: int) -> None:
    model = build(row.model, device)
    batches = text(device, *BATCH)
    optimizer = optimizer_of(row.optimizer, model)
    if row.way == "plan":
        start_s = time.perf_counter()
        plan_for(model, next(text(device, *BATCH)), limit_bytes, optimizer)
        report(name, "plan_s", "s", [time.perf_counter() - start_s])
    else:
        checkpoint(model, float(row.way))
    step_in_backward(row.optimizer, model, optimizer)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, step_ms = [], []
    for _ in range(WARM_UP + TIMED):
        loss, ms = step(model, optimizer, next(batches))
        step_ms.append(ms)
        losses.append(loss)
    tokens = BATCH[0] * BATCH[1]
    report(name, "step_ms", "ms", step_ms[WARM_UP:])
    report(name, "tokens_per_s", "1/s", [1000 * tokens / ms for ms in step_ms[WARM_UP:]])
    report(name, "loss", "nat", losses)
    report(name, "limit_bytes", "B", [limit_bytes])
    if device.type == "cuda":
        report(name, "peak_reserved_bytes", "B", [torch.cuda.max_memory_reserved()])
        report(name, "peak_allocated_bytes", "B", [torch.cuda.max_memory_allocated()])


def lengthen(name: str, row: Row, device: torch.device, limit_bytes: int) -> None:
    """Train on one sequence that grows until memory runs out; report the longest that did not."""
    model = build(row.model, device)
    optimizer = optimizer_of(row.optimizer, model)
    hooks: Callable[[], Any] = contextlib.nullcontext
    if row.way == RECOMPUTED:
        found = vramx.optimize(model, RECOMPUTED, offload="cpu")
        swapped = {each.name for each in found.swapped}
        assert "model.layers.0" in swapped, f"blocks are left: {found}"
    else:
        checkpoint(model, 1.0)
        hooks = partial(torch.autograd.graph.save_on_cpu, pin_memory=device.type == "cuda")
    step_in_backward(row.optimizer, model, optimizer)
    tried: list[Tried] = []
    length: int | None = SHORTEST
    while length is not None:
        tried.append(_tried(length, model, optimizer, device, hooks))
        print(name, tried[-1], file=sys.stderr, flush=True)
        power = 1 if row.window else 2
        length = next_length(tried, limit_bytes, LONGEST, LONGEST_STEP_MS, power)
    longest = max(each for each in tried if each.fits)
    report(name, "longest_tokens", "1", [longest.length])
    report(name, "step_ms", "ms", [longest.ms])
    if longest.peak_bytes is not None:
        report(name, "peak_allocated_bytes", "B", [longest.peak_bytes])
    report(name, "limit_bytes", "B", [limit_bytes])


def _tried(
    length: int, model: Any, optimizer: Any, device: torch.device, hooks: Callable[[], Any]
) -> Tried:
    """Train on one sequence of that length, unless memory runs out."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    # The first is not expected to: why it does not fit is told then.
    within: Any = torch.OutOfMemoryError if length > SHORTEST else ()
    with contextlib.suppress(within):
        _, ms = step(model, optimizer, next(text(device, 1, length)), hooks)
        return Tried(length, ms, torch.cuda.max_memory_allocated() if is_gpu else None, True)
    optimizer.zero_grad()
    if is_gpu:
        torch.cuda.empty_cache()
    return Tried(length, 0.0, None, False)


def step(
    model: Any, optimizer: Any, batch: Any, hooks: Callable[[], Any] = contextlib.nullcontext
) -> tuple[float, float]:
    """Train on a batch; return its loss and the milliseconds that it took."""
    synchronize()
    start_s = time.perf_counter()
    with hooks():
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    synchronize()
    return float(loss.detach()), 1000 * (time.perf_counter() - start_s)


def build(name: str, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = llama_config(*SHAPES[name], max_position_embeddings=4096)
    torch.manual_seed(SEED)
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def text(device: torch.device, rows: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of the standard library's sources, a token for each byte."""
    root = Path(sysconfig.get_path("stdlib"))
    held = bytearray()
    while True:
        for path in sorted(root.glob("*.py")):
            held += path.read_bytes()
            while len(held) >= rows * length:
                tokens = torch.frombuffer(held[: rows * length], dtype=torch.uint8)
                del held[: rows * length]
                ids = tokens.view(rows, length).long().to(device)
                yield {"input_ids": ids, "labels": ids}


# --- ways ---------------------------------------------------------------------------------------


def plan_for(model: Any, batch: Any, limit_bytes: int, optimizer: Any) -> None:
    """Plan for the limit, at levels whose gradients have 8 bits at least."""
    plan = vramx.plan(
        model,
        batch,
        limit_bytes,
        levels=("keep", "int8", "recompute_mlp", "recompute_all"),
        optimizer=optimizer,
        gradients="stepped",
    )
    print(plan, file=sys.stderr)
    plan.apply()


def checkpoint(model: Any, share: float) -> None:
    """Liger's kernels and loss, and transformers' checkpoints around a share of the layers."""
    if torch.cuda.is_available():
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    if not share:
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = model.model.layers
    for layer in layers[round(share * len(layers)) :]:
        layer.gradient_checkpointing = False


# --- optimizers -----------------------------------------------------------------------------------


def optimizer_of(name: str, model: nn.Module) -> Any:
    if not torch.cuda.is_available():
        return torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS)
    if name == "torchao":
        return PerParameter(model)
    from flashoptim import FlashAdamW

    optimizer = FlashAdamW(model.parameters(), lr=RATE, betas=BETAS)
    return vramx.offload_optimizer(optimizer, in_backward=True) if "offload" in name else optimizer


def step_in_backward(name: str, model: nn.Module, optimizer: Any) -> None:
    if name == "flash" and torch.cuda.is_available():
        from flashoptim import enable_gradient_release

        enable_gradient_release(model, optimizer)


class PerParameter:
    """torchao's AdamW8bit for each parameter by itself, stepped when its gradient is there."""

    def __init__(self, model: nn.Module) -> None:
        from torchao.optim import AdamW8bit

        def hook_of(optimizer: Any) -> Callable[[Tensor], None]:
            def hook(_parameter: Tensor) -> None:
                optimizer.step()
                optimizer.zero_grad()

            return hook

        for parameter in model.parameters():
            one = AdamW8bit([parameter], lr=RATE, betas=BETAS, bf16_stochastic_round=True)
            parameter.register_post_accumulate_grad_hook(hook_of(one))

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


if __name__ == "__main__":
    main(sys.argv[1])
