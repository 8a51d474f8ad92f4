"""Differentiates models that keep less on two GPUs, one process each, under torchrun.

    two_gpu_activations.py

Rank 0 prints for each way of keeping less, and for each way of training in parallel, how far the
gradients of a small model are from those of the untouched one in float32 on one GPU, whether both
ranks have the same, and how many tensors were packed or blocks swapped.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel, ViTConfig, ViTModel
from two_gpu_tools import gathered, group

import vramx

LAYERS = 2
ROWS, TOKENS, VOCABULARY = 4, 64, 128


def llama() -> tuple[nn.Module, torch.Tensor]:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaModel(config), token_numbers()


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=256, n_layer=LAYERS, n_head=4, use_cache=False, **drop
    )
    return GPT2Model(config), token_numbers()


def vit() -> tuple[nn.Module, torch.Tensor]:
    config = ViTConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        image_size=32,
        patch_size=4,
    )
    # A pooling layer would have parameters that are not used.
    return ViTModel(config, add_pooling_layer=False), torch.randn(ROWS, 3, 32, 32)


def token_numbers() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS]
    return list(lists[0])


def compress(model: nn.Module) -> int:
    for block in blocks_of(model):
        vramx.compressed_activations(block, min_bytes=0)
    return 0


def optimize(level: str) -> Callable[[nn.Module], int]:
    return lambda model: len(vramx.optimize(model, level, min_bytes=0).swapped)


def checkpoint(model: nn.Module) -> int:
    options = vramx.Compression(min_bytes=0)
    return len(vramx.checkpoint_modules(model, where=type(blocks_of(model)[0]), level=options))


WAYS = {
    "exact": lambda _: 0,
    "compress": compress,
    "checkpoint": checkpoint,
    **{level: optimize(level) for level in ("keep", "int8", "recompute_mlp", "recompute_all")},
}


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, torch.Tensor]], tuple[str, ...]]] = {
    "llama": (llama, tuple(WAYS)),
    "gpt2": (gpt2, ("exact", "int8", "recompute_all")),
    "vit": (vit, ("exact", "int8", "recompute_all")),
}


def replicated(model: nn.Module, rank: int) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[rank])


def sharded(model: nn.Module, _rank: int) -> nn.Module:
    for block in blocks_of(model):
        fully_shard(block)
    return fully_shard(model)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x).last_hidden_state
    # Other weights for each token and row, the same whichever rank has it.
    weights = torch.sin(torch.arange(y[0].numel(), device=y.device)).view(y[0].shape)
    return (y * weights * x.float().flatten(1).std(1)[:, None, None]).mean()


def gradient(model: nn.Module) -> torch.Tensor:
    found = []
    for parameter in model.parameters():
        grad: Any = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found.append(grad.flatten())
    return torch.cat(found)


def compared(name: str, rank: int) -> dict[str, dict[str, Any]]:
    """Return what each way of keeping less, and of training in parallel, does to one model."""
    build, ways = MODELS[name]
    torch.manual_seed(0)
    untouched, x = build()
    untouched, x = untouched.cuda().train(), x.cuda()
    loss(untouched, x).backward()
    exact = gradient(untouched)
    untouched.zero_grad()
    facts = {}
    for way in ways:
        for kind, spread in (("ddp", replicated), ("fsdp", sharded)):
            model = copy.deepcopy(untouched)
            changed = WAYS[way](model)
            blocks = blocks_of(model)
            parallel = spread(model, rank)
            loss(parallel, x.chunk(2)[rank]).backward()
            found = gradient(parallel)
            mine = found.clone()
            distributed.broadcast(mine, 0)
            packed = 0
            if way == "compress":
                packed = sum(vramx.compression_stats(block).packed.tensors for block in blocks)
            facts[f"{name} {kind} {way}"] = {
                "error": ((found - exact).norm() / exact.norm()).item(),
                "same": torch.equal(mine, found),
                "changed": changed or packed,
            }
    return facts


def main(rank: int) -> None:
    facts: dict[str, dict[str, Any]] = {}
    for name in MODELS:
        facts |= compared(name, rank)
    same = gathered(all(fact["same"] for fact in facts.values()))
    if rank == 0:
        print(json.dumps({"ways": facts, "same": all(same)}), flush=True)


if __name__ == "__main__":
    with group() as rank:
        main(rank)
