"""What all recipes share: a model, data, a loop that measures, and the command line.

A recipe is a file with VARIANTS, functions by name. Each gets a Place, trains for some steps, and
returns figures. A line of JSON is printed for each variant. On a GPU each variant has a process of
its own, so that none inherits another's memory; on a CPU, where models are small, all have one.
Bytes come from torch.cuda and are left out where there is no GPU.

    python RECIPE.py [--variant NAME] [--small]
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Size = TypeVar("Size")
Figures = dict[str, Any]
Variant = Callable[["Place"], Figures]

SEED = 2026
# 0.5 billion parameters on a GPU.
LARGE = SimpleNamespace(hidden=1536, layers=16, inner=4096, heads=12, key_heads=4, vocabulary=32000)
SMALL = SimpleNamespace(hidden=64, layers=2, inner=128, heads=4, key_heads=2, vocabulary=256)


class UnavailableError(Exception):
    """A variant cannot run here; the text says what it needs."""


@dataclass(frozen=True)
class Place:
    """Where a variant runs, and how large it is."""

    device: torch.device = field(
        default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    small: bool = False

    def sized(self, full: Size, small: Size) -> Size:
        return small if self.small else full

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def warm_up(self) -> int:
        return self.sized(3, 1)

    @property
    def steps(self) -> int:
        """How many steps there are, with those that warm up."""
        return self.sized(10, 2)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def needs_gpu(self, why: str) -> None:
        if not self.is_gpu:
            raise UnavailableError(f"{why} needs a GPU")


# --- model and data -------------------------------------------------------------------------------


def language_model(place: Place, dtype: torch.dtype = torch.float32) -> Any:
    """Return a Llama with fresh weights: transformers', or the one of plain_llama.py."""
    shape = place.sized(LARGE, SMALL)
    torch.manual_seed(SEED)
    with place.device:
        if importlib.util.find_spec("transformers"):
            return _of_transformers(shape, dtype).train()
        from plain_llama import PlainLlama

        return PlainLlama(shape).to(dtype).train()


def _of_transformers(shape: SimpleNamespace, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        use_cache=False,
        attn_implementation="sdpa",
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW in its fused form, which makes no temporary copies of all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@functools.cache
def text() -> Tensor:
    """Return a few million bytes of the standard library's sources, one token a byte."""
    root = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(root.glob("*.py"))[:80])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch_of(place: Place, rows: int, length: int, index: int = 0) -> Tensor:
    """Return the index-th batch of so many rows of text, on the device."""
    data = text()
    start = index * rows * length % (len(data) - rows * length)
    return data[start : start + rows * length].view(rows, length).long().to(place.device)


def batches(place: Place, rows: int = 8, length: int = 1024) -> Iterator[Tensor]:
    """Yield batches without end."""
    rows, length = place.sized((rows, length), (4, 32))
    index = 0
    while True:
        yield batch_of(place, rows, length, index)
        index += 1


def lengths(place: Place, count: int) -> list[int]:
    """Return lengths that differ from each other as those of documents do, the same each time."""
    generator = torch.Generator().manual_seed(SEED)
    longest = place.sized(2048, 64)
    drawn = torch.empty(count).log_normal_(-1.5, 0.8, generator=generator)
    return [int(value) for value in (drawn * longest).clamp(longest // 16, longest)]


# --- the loop -------------------------------------------------------------------------------------


def train(place: Place, model: Any, optimizer: Any) -> Figures:
    """Train as anyone does, and return what was measured."""
    data = batches(place)
    return measure(place, lambda _index: learn(place, model, optimizer, next(data)))


def train_varying(place: Place, count: int, after: Callable[[], Any] = lambda: None) -> Figures:
    """Train on so many texts whose length differs from step to step; call `after` in each step."""
    model = language_model(place)
    optimizer = adamw(model)
    drawn = lengths(place, place.sized(count, 2))

    def step(index: int) -> Tensor:
        loss = learn(place, model, optimizer, batch_of(place, 8, drawn[index], index))
        after()
        return loss

    return measure(place, step, len(drawn))


def learn(place: Place, model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    """Take a step under autocast in bfloat16, and return its loss."""
    with place.autocast():
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measure(place: Place, step: Callable[[int], Any], steps: int | None = None) -> Figures:
    """Call `step` with 0, 1, ... and return losses, milliseconds a step, and the peaks.

    What `step` returns is kept as its loss. Each step is timed between two synchronisations.
    """
    losses, step_ms = [], []
    for index in range(place.steps if steps is None else steps):
        synchronize(place)
        start_s = time.perf_counter()
        loss = step(index)
        synchronize(place)
        step_ms.append(1000 * (time.perf_counter() - start_s))
        losses.append(float(loss))
    return {"losses": losses, "step_ms": step_ms[place.warm_up :], **peaks(place)}


def install(place: Place) -> None:
    """Have vramx serve this process, where there is a GPU: before anything uses it."""
    if place.is_gpu:
        import vramx

        vramx.install_allocator()


def synchronize(place: Place) -> None:
    if place.is_gpu:
        torch.cuda.synchronize(place.device)


def peaks(place: Place) -> Figures:
    """Return the most that was allocated and reserved so far; nothing where there is no GPU."""
    if not place.is_gpu:
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(place.device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(place.device),
    }


def generate(place: Place, model: Any, prompts: Tensor, new: int, **options: Any) -> Tensor:
    """Return prompts with `new` sampled tokens behind each: with a cache, where there is one."""
    with torch.no_grad(), place.autocast():
        if hasattr(model, "generate"):
            options = {"max_new_tokens": new, "do_sample": True, "use_cache": True} | options
            return model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        for _ in range(new):
            chances = model(prompts).logits[:, -1].float().softmax(-1)
            prompts = torch.cat([prompts, torch.multinomial(chances, 1)], dim=1)
        return prompts


def kept_bytes(model: nn.Module, optimizer: Any = None) -> Figures:
    """Return the bytes of parameters and of the optimizer's states, wherever they are."""
    states = optimizer.state.values() if optimizer is not None else ()
    tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
    return {
        "parameters_bytes": sum(p.nbytes for p in model.parameters()),
        "states_bytes": sum(tensor.nbytes for tensor in tensors),
    }


# --- the command line -----------------------------------------------------------------------------


def run(variants: Mapping[str, Variant], name: str, place: Place) -> Figures:
    """Run a variant; return its figures and a status: "ok", or why there are none."""
    torch.manual_seed(SEED)
    try:
        return {"status": "ok", **variants[name](place)}
    except torch.OutOfMemoryError:
        return {"status": "out of memory"}
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        return {"status": f"not installed: {error.name}"}
    except UnavailableError as error:
        return {"status": f"not run: {error}"}
    finally:
        gc.collect()


def main(variants: Mapping[str, Variant], description: str | None) -> None:
    """Run the variants that the command line asks for, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--variant", choices=list(variants), help="one of them; all without it")
    parser.add_argument("--small", action="store_true", help="a model of a few thousand parameters")
    args = parser.parse_args()
    place = Place(small=args.small or not torch.cuda.is_available())
    if place.small and not place.is_gpu:
        torch.set_num_threads(1)  # threads cost more than such a model computes
    if args.variant is None and place.is_gpu:
        small = ["--small"] if args.small else []
        for name in variants:
            subprocess.run([sys.executable, sys.argv[0], "--variant", name, *small], check=False)
        return
    for name in [args.variant] if args.variant else variants:
        figures = run(variants, name, place)
        if "step_ms" in figures:
            figures["step_ms"] = round(statistics.median(figures["step_ms"]), 3)
        recipe = Path(sys.argv[0]).stem
        print(json.dumps({"recipe": recipe, "variant": name, **figures}), flush=True)
