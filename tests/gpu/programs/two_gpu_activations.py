"""Differentiates models that keep less on two GPUs, one process each, under torchrun.

    two_gpu_activations.py

Rank 0 prints for each way of keeping less, and for each way of training in parallel, how far the
gradients of a small Llama are from those of the untouched one in float32 on one GPU, whether both
ranks have the same, and how many tensors were packed or blocks swapped.
"""

import copy
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaModel

import vramx

LAYERS = 2
ROWS, TOKENS, VOCABULARY = 4, 64, 128


def make() -> nn.Module:
    torch.manual_seed(0)
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
    return LlamaModel(config).cuda().train()


def compress(model: Any) -> int:
    for layer in model.layers:
        vramx.compressed_activations(layer, min_bytes=0)
    return 0


def optimize(level: str) -> Callable[[Any], int]:
    return lambda model: len(vramx.optimize(model, level).swapped)


def checkpoint(model: Any) -> int:
    options = vramx.Compression(min_bytes=0)
    return len(vramx.checkpoint_modules(model, where=type(model.layers[0]), compress=options))


WAYS = {
    "exact": lambda _: 0,
    "compress": compress,
    "checkpoint": checkpoint,
    **{level: optimize(level) for level in ("keep", "int8", "recompute_mlp", "recompute_all")},
}


def replicated(model: nn.Module, rank: int) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[rank])


def sharded(model: Any, _rank: int) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    y = model(input_ids=tokens).last_hidden_state
    # Other weights for each token, the same whichever rank has it.
    weights = torch.sin(torch.arange(y[0].numel(), device=y.device)).view(y[0].shape)
    return (y * weights * tokens.unsqueeze(-1)).mean()


def gradient(model: nn.Module) -> torch.Tensor:
    found = []
    for parameter in model.parameters():
        grad: Any = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found.append(grad.flatten())
    return torch.cat(found)


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    untouched = make()
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), device="cuda", generator=generator)
    loss(untouched, tokens).backward()
    exact = gradient(untouched)
    untouched.zero_grad()
    facts = {}
    for way, change in WAYS.items():
        for kind, spread in (("ddp", replicated), ("fsdp", sharded)):
            model: Any = copy.deepcopy(untouched)
            changed = change(model)
            layers = list(model.layers)
            parallel = spread(model, rank)
            loss(parallel, tokens.chunk(2)[rank]).backward()
            found = gradient(parallel)
            mine = found.clone()
            distributed.broadcast(mine, 0)
            packed = 0
            if way == "compress":
                packed = sum(vramx.compression_stats(layer).packed.tensors for layer in layers)
            facts[f"{kind} {way}"] = {
                "error": ((found - exact).norm() / exact.norm()).item(),
                "same": torch.equal(mine, found),
                "changed": changed or packed,
            }
    same = [None, None]
    distributed.all_gather_object(same, all(fact["same"] for fact in facts.values()))
    if rank == 0:
        print(json.dumps({"ways": facts, "same": all(same)}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
