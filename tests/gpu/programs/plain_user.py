"""A user's training script, which knows nothing of vramx.

    plain_user.py [--exit CODE] [WORD...]

Trains a small model for a few steps, prints which allocator served it, then ends with CODE.
"""

import argparse
import json
import os
import sys

import torch


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    # None of these uses CUDA, and programs ask before they do.
    early_statistics = dict(torch.cuda.memory_stats())
    early_bytes = torch.cuda.memory_allocated() + torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    initialised_early = torch.cuda.is_initialized()
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        loss = model(torch.randn(32, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    facts = {
        "backend": torch.cuda.get_allocator_backend(),
        "initialised_early": initialised_early,
        "early_statistics": early_statistics,
        "early_bytes": early_bytes,
        "loss": loss.item().hex(),
        "rank": os.environ.get("RANK"),
        "words": options.words,
    }
    print(json.dumps(facts))
    return options.exit


if __name__ == "__main__":
    sys.exit(main())
