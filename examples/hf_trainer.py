"""transformers' Trainer with fused blocks that keep int8, on texts of varying length.

What it shows: two lines before a Trainer, `vramx.install_allocator()` and `vramx.optimize(model)`,
and a callback, `TransformersMemory`, which puts the exact peak of each step into Trainer's log. The
logits of the vocabulary, the largest tensor of a small language model, are not made in training.
What to expect: on a GPU Trainer trains twice, the model as it is and then optimised, and the
highest peaks are compared. On a CPU it trains a tiny optimised model, and `vramx.predict`, which
needs neither a GPU nor the memory, says what steps of the larger one would take on a GPU.
Needs: transformers and accelerate. Half a minute on a GPU.

    python examples/hf_trainer.py
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import vramx
from vramx.callbacks import TransformersMemory


class Size(NamedTuple):
    layers: int
    width: int
    vocabulary: int
    longest: int  # of the texts, in tokens


SIZES = {"small": Size(8, 1024, 32_000, 1024), "tiny": Size(2, 64, 512, 48)}


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="transformers' Trainer with vramx")
    parser.add_argument("--size", choices=SIZES, default="small" if has_gpu else "tiny")
    parser.add_argument("--steps", type=int, default=10 if has_gpu else 3)
    args = parser.parse_args()
    size = SIZES[args.size]
    if has_gpu:
        vramx.install_allocator()  # before anything uses the GPU
        plain = train(llama(size), size, args.steps)
        gc.collect()  # a trainer and its callbacks refer to each other
        torch.cuda.empty_cache()
    else:
        print(prediction(SIZES["small"]))

    model = llama(size)
    print(vramx.optimize(model))
    optimised = train(model, size, args.steps)
    if has_gpu:
        print(f"as it is: {plain}")
        print(f"optimised: {optimised}")
        print(f"saved at the peak: {(plain.peak_bytes - optimised.peak_bytes) / 2**20:,.0f} MiB")


def train(model: LlamaForCausalLM, size: Size, steps: int) -> vramx.Tracked:
    """Train with a Trainer as it always is; return the step with the highest peak."""
    memory = TransformersMemory()
    choose = random.Random(0)
    lengths = [choose.randint(size.longest // 4, size.longest) for _ in range(4 * steps)]
    texts = [text(length) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=steps,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model, arguments, pad, texts, callbacks=[memory]).train()
    assert memory.highest is not None
    return memory.highest


def llama(size: Size) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 32,
        num_key_value_heads=size.width // 64,
        use_cache=False,  # a block that fills a cache is called as it was
    )
    return LlamaForCausalLM(config)


def prediction(size: Size) -> vramx.Prediction:
    """Predict Trainer's step for a longest batch on a GPU, as the model is and optimised."""
    with torch.device("meta"):
        model = llama(size)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = pad([text(size.longest) for _ in range(4)])

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return vramx.predict(step, levels=("left", "int8"))


def text(length: int) -> dict[str, list[int]]:
    """Make a text of tokens that follow from each other; a tokenizer stands here in yours."""
    start = random.randrange(500)
    return {"input_ids": [(start + 7 * i) % 500 for i in range(length)]}


def pad(texts: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Make a batch as long as its longest text; what is padded is neither seen nor learned."""
    longest = max(len(each["input_ids"]) for each in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(texts):
        length = len(each["input_ids"])
        ids[row, :length] = torch.tensor(each["input_ids"])
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


if __name__ == "__main__":
    main()
