"""A Llama of three billion parameters trained in 24 GiB: one call of vramx.plan for a budget.

What it shows: `vramx.plan` chooses for each block what it keeps for backward, so that a whole step
(weights, gradients, optimizer, activations) stays within a budget; the step is taken in backward,
so that no two gradients are there at a time. FlashOptim's AdamW keeps 24 bits of each weight and
states of 8 bits; with `--offload` these wait on the host, by `vramx.offload_optimizer`. Where it is
not installed torch's AdamW does, with its states on the host.
What to expect: about 28,000 tokens/s on an H100 with FlashOptim, less with states on the host.
`--size tiny` takes seconds on a CPU, where bytes are those of the host's tensors.
Needs: transformers, and for `--size 3b` a GPU with 24 GiB; flashoptim if you can. The text is the
sources of Python's standard library, a token for each byte, or `--text FILE`.

    python examples/train_3b.py
    python examples/train_3b.py --budget 12GiB --offload
    python examples/train_3b.py --size tiny
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import vramx

# Hidden, layers, feed-forward, heads, heads of keys, vocabulary; rows and tokens of a batch.
SIZES = {
    "3b": ((3072, 28, 8192, 24, 8, 32_000), (16, 512)),
    "tiny": ((64, 4, 128, 4, 2, 300), (4, 64)),
}
# All but "int4", whose gradients are noisier.
LEVELS = ("keep", "int8", "recompute_mlp", "recompute_all")


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        vramx.install_allocator()  # before anything uses the GPU
        vramx.set_limit(args.budget)  # so that the budget is a promise
    shape, (rows, length) = SIZES[args.size]
    model = llama(shape, device)
    batches = text(args.text, rows, length, device)

    optimizer, is_released = make_optimizer(model, args.offload)
    plan = vramx.plan(
        model,
        next(batches),
        budget=args.budget,
        levels=LEVELS,
        optimizer=optimizer,
        gradients="stepped",
    )
    print(plan)
    plan.apply()
    if is_released:  # FlashOptim's step in backward: after the plan, which measures a step without
        from flashoptim import enable_gradient_release

        enable_gradient_release(model, optimizer)

    with vramx.track("training", synchronize=True) as memory:
        for step, batch in enumerate(itertools.islice(batches, args.steps), 1):
            start_s = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()  # ends the round: most parameters were stepped in backward
            optimizer.zero_grad()
            shown = f"step {step}: loss {loss.item():.3f}"  # waits for the GPU
            print(f"{shown}, {rows * length / (time.perf_counter() - start_s):,.0f} tokens/s")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Of each parameter: weight, gradient, and three of float32: weight and two states.
    usual = (2 + 2 + 3 * 4) * parameters / 2**20
    print(f"{memory}; the budget was {args.budget}, the plan's peak {plan.measured_bytes:,} bytes")
    print(f"{parameters:,} parameters; AdamW in mixed precision takes {usual:,.0f} MiB for them,")
    print("before any activation")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a Llama trained within a budget")
    default = "3b" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--size", choices=SIZES, default=default)
    parser.add_argument("--budget", default="24GiB", help="for example 12GiB (default: 24GiB)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--offload", action="store_true", help="keep states on the host")
    parser.add_argument("--text", type=Path, help="a file (default: Python's own sources)")
    return parser.parse_args()


def llama(shape: tuple[int, ...], device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, layers, inner, heads, key_heads, vocabulary = shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        use_cache=False,  # a cache would keep keys and values that training does not use
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def make_optimizer(model: nn.Module, offloads: bool) -> tuple[torch.optim.Optimizer, bool]:
    """Return the optimizer, and whether its own step in backward is still to be enabled."""
    if torch.cuda.is_available() and importlib.util.find_spec("flashoptim"):
        from flashoptim import FlashAdamW

        # Second moments of 8 bits need a beta2 below torch's 0.999: docs/recipes/small_states.md.
        optimizer = FlashAdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))
        if not offloads:
            return optimizer, True
    else:
        # In bfloat16 without 24-bit weights: small updates are rounded away, so a larger rate.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return vramx.offload_optimizer(optimizer, in_backward=True), False


def text(
    path: Path | None, rows: int, length: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield batches, a token for each byte, for ever."""
    paths = [path] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not any(each.stat().st_size for each in paths):
        raise SystemExit(f"{path} is empty")
    held = bytearray()
    for each in itertools.cycle(paths):
        held += each.read_bytes()
        while len(held) >= rows * length:
            tokens = torch.frombuffer(held[: rows * length], dtype=torch.uint8).long()
            del held[: rows * length]
            ids = tokens.view(rows, length).to(device)
            yield {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    main()
