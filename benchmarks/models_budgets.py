"""Models of users for the benchmark of budgets: each with its loss, as a training loop has it.

A language model, one with low-rank adapters on all linear layers, one with experts, an older one
with dropout, a bidirectional one under autocast, and a convolutional one. Weights and batches are
random; batches are so large that the GPU sets the pace: where a busy host does, steps of one plan
differ by more than those of two. A model's library is imported by its builder only;
PROGRAM_SIZE=tiny makes all of them small enough for a processor. Building takes some seconds, most
of it imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.models_configs import gpt2_config, llama_config
from benchmarks.programs._adapters import Adapters, adapt
from benchmarks.programs._report import sized

VOCABULARY = sized(32_000, 64)
CLASSES = 16


class Subject(NamedTuple):
    """A model, and the loss of a step of it."""

    model: nn.Module
    loss: Callable[[Any], Tensor]


def _tokens(rows: int, length: int, device: torch.device) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), device=device)


def _language_model(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _with_labels(model: Any, ids: Tensor) -> Subject:
    return Subject(model, lambda model: model(input_ids=ids, labels=ids).loss)


def _llama(layers: int) -> Any:
    sizes = sized((2048, layers, 5632, 16, 4), (64, layers, 128, 4, 2))
    return _language_model(llama_config(VOCABULARY, sizes))


def llama(device: torch.device) -> Subject:
    return _with_labels(_llama(sized(6, 2)), _tokens(*sized((16, 1024), (2, 32)), device))


def llama_lora(device: torch.device) -> Subject:
    """With adapters in bfloat16 on all linear layers, everything else frozen."""
    model = adapt(_llama(sized(6, 2)), Adapters(dropout=0.0), torch.bfloat16)
    return _with_labels(model, _tokens(*sized((32, 1024), (2, 32)), device))


def experts(device: torch.device) -> Subject:
    """Mixtral's layers: each token goes to two of eight experts."""
    sizes = sized((1024, 8, 2048, 16, 4), (64, 2, 128, 4, 2))
    config = llama_config(VOCABULARY, sizes, "MixtralConfig", num_local_experts=8)
    return _with_labels(_language_model(config), _tokens(*sized((32, 1024), (2, 32)), device))


def gpt2(device: torch.device) -> Subject:
    config = gpt2_config(VOCABULARY, *sized((1536, 8, 16), (64, 2, 4)))
    return _with_labels(_language_model(config), _tokens(*sized((24, 1024), (2, 32)), device))


def bert(device: torch.device) -> Subject:
    """Weights in float32, forward passes under autocast."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=sized(8192, 64),
        hidden_size=sized(1024, 64),
        num_hidden_layers=sized(8, 2),
        num_attention_heads=sized(16, 4),
        intermediate_size=sized(4096, 128),
    )
    ids = _tokens(*sized((192, 512), (2, 32)), device) % config.vocab_size

    def loss(model: Any) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            result: Tensor = model(input_ids=ids, labels=ids).loss
        return result

    return Subject(BertForMaskedLM(config), loss)


def resnet(device: torch.device) -> Subject:
    """ResNet-50 under autocast."""
    from torchvision.models import resnet18, resnet50

    images = torch.randn(sized(768, 4), 3, *sized((224, 224), (32, 32)), device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (len(images),), device=device)
    model = sized(resnet50, resnet18)(num_classes=CLASSES)

    def loss(model: Any) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            scores = model(images)
        return cross_entropy(scores.float(), labels)

    return Subject(model.to(memory_format=torch.channels_last), loss)


SUBJECTS: dict[str, Callable[[torch.device], Subject]] = {
    builder.__name__: builder for builder in (llama, gpt2, llama_lora, experts, resnet, bert)
}


def build(name: str, device: torch.device, seed: int) -> Subject:
    """Build a model of SUBJECTS on a device, its weights drawn there."""
    torch.manual_seed(seed)
    with device:
        subject = SUBJECTS[name](device)
    subject.model.to(device).train()
    return subject
