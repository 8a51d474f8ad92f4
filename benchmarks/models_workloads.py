"""Models that nobody wrote for vramx, with batches and losses, for benchmarks of activations.

Each builder returns a Workload: a model of a library (or, for the U-Net, of a file that knows no
vramx) with random weights and data that can be learnt; nothing is downloaded. A model's library is
imported by its builder only. PROGRAM_SIZE=tiny makes all of them small enough for a processor.
Deterministic for a seeded process. Building takes some seconds, most of it imports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.models_configs import gpt2_config, llama_config
from benchmarks.programs._report import sized

CLASSES = 16
NOISE = 0.25  # the share of tokens that follow no rule


class Batch(NamedTuple):
    """What one step is given."""

    inputs: Any
    targets: Tensor


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        targets: what the one line decorates: classes of blocks, or the model itself.
        draw: makes a batch from a generator: the large one, or with False that of a long training.
        forward: the part that is decorated; its result goes to `loss` with the batch.
        blocks: the repeated blocks, for checkpointing; empty where there are none.
        set_depth: has `forward` run that many of the blocks only; None where nothing does.
        elements: tokens x hidden x layers of the large batch, the unit of a transformer's memory;
            0 where that means nothing.
    """

    model: nn.Module
    targets: tuple[Any, ...]
    draw: Callable[[torch.Generator, bool], Batch]
    forward: Callable[[Batch], Tensor]
    loss: Callable[[Tensor, Batch], Tensor]
    is_autocast: bool = True
    blocks: tuple[nn.Module, ...] = field(default=())
    set_depth: Callable[[int], None] | None = None
    elements: int = 0


@dataclass(frozen=True)
class Text:
    """Sequences that count in steps of a length of their own, with errors."""

    vocabulary: int
    large: tuple[int, int]  # sequences and tokens
    small: tuple[int, int]
    predicts_next: bool

    def draw(self, generator: torch.Generator, is_large: bool) -> Batch:
        rows, length = self.large if is_large else self.small
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        first = torch.randint(0, self.vocabulary, (rows, 1), **options)
        stride = torch.randint(1, 8, (rows, 1), **options)
        places = torch.arange(length + 1, device=generator.device)
        clean = (first + stride * places) % self.vocabulary
        errors = torch.randint(0, self.vocabulary, clean.shape, **options)
        tokens = torch.where(torch.rand(clean.shape, **options) < NOISE, errors, clean)
        targets = clean[:, 1:] if self.predicts_next else clean[:, :-1]
        return Batch(tokens[:, :-1].contiguous(), targets.contiguous())

    def elements(self, hidden: int, layers: int) -> int:
        rows, length = self.large
        return rows * length * hidden * layers


def pictures(large: int, small: int, side: int) -> Callable[[torch.Generator, bool], Batch]:
    """Return a maker of noisy pictures, each with the pattern of its class."""

    def draw(generator: torch.Generator, is_large: bool) -> Batch:
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        labels = torch.randint(0, CLASSES, (large if is_large else small,), **options)
        places = torch.arange(side, device=generator.device) / side
        pattern = torch.sin((labels[:, None] + 1) * 6.28 * places)  # a frequency for each class
        noise = torch.randn(len(labels), 3, side, side, **options)
        return Batch(noise + pattern[:, None, :, None], labels)

    return draw


def token_loss(head: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Batch], Tensor]:
    """Return the mean cross-entropy of what `head` makes of hidden states."""
    return lambda hidden, batch: cross_entropy(
        head(hidden).float().flatten(0, 1), batch.targets.flatten()
    )


def class_loss(scores: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(scores.float(), batch.targets)


def llama(layers: int | None = None) -> Workload:
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    hidden, layers = sized(4096, 64), layers or sized(4, 2)
    text = Text(sized(2048, 64), sized((2, 4096), (2, 32)), sized((2, 256), (2, 16)), True)
    sizes = (hidden, layers, *sized((14336, 32, 8), (224, 4, 2)))
    config = llama_config(text.vocabulary, sizes, max_position_embeddings=4096)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Workload(
        model,
        (LlamaDecoderLayer,),
        text.draw,
        lambda batch: model.model(input_ids=batch.inputs).last_hidden_state,
        token_loss(model.lm_head),
        is_autocast=False,
        blocks=tuple(model.model.layers),
        set_depth=lambda depth: setattr(model.config, "num_hidden_layers", depth),
        elements=text.elements(hidden, layers),
    )


def gpt2(rows: int | None = None) -> Workload:
    """GPT-2 with its dropouts, wider than the largest that was published (1600).

    Args:
        rows: sequences of the large batch.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    hidden, layers = sized(2048, 64), sized(4, 2)
    large = (rows or sized(8, 2), sized(1024, 32))
    text = Text(sized(2048, 64), large, sized((4, 256), (2, 16)), True)
    config = gpt2_config(text.vocabulary, hidden, layers, sized(16, 4))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Workload(
        model,
        (GPT2Block,),
        text.draw,
        lambda batch: model.transformer(input_ids=batch.inputs).last_hidden_state,
        token_loss(model.lm_head),
        is_autocast=False,
        blocks=tuple(model.transformer.h),
        elements=text.elements(hidden, layers),
    )


def bert() -> Workload:
    from transformers import BertConfig, BertForMaskedLM
    from transformers.models.bert.modeling_bert import BertLayer

    hidden, layers = sized(1024, 64), sized(6, 2)
    text = Text(sized(2048, 64), sized((32, 512), (2, 32)), sized((8, 128), (2, 16)), False)
    config = BertConfig(
        vocab_size=text.vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=sized(16, 4),
        intermediate_size=4 * hidden,
        attn_implementation="sdpa",
    )
    model: Any = BertForMaskedLM(config)
    return Workload(
        model,
        (BertLayer,),
        text.draw,
        lambda batch: model.bert(input_ids=batch.inputs).last_hidden_state,
        token_loss(model.cls),
        blocks=tuple(model.bert.encoder.layer),
        elements=text.elements(hidden, layers),
    )


def vit(images: int | None = None) -> Workload:
    """ViT-L with 8 of its 24 layers; `images`: of the large batch."""
    import timm
    from timm.models.vision_transformer import Block

    name = sized("vit_large_patch16_224", "vit_tiny_patch16_224")
    layers, images = sized(8, 2), images or sized(64, 2)
    model: Any = timm.create_model(name, pretrained=False, num_classes=CLASSES, depth=layers)
    return Workload(
        model,
        (Block,),
        pictures(images, sized(16, 2), 224),
        lambda batch: model(batch.inputs),
        class_loss,
        blocks=tuple(model.blocks),
        elements=images * 197 * model.embed_dim * layers,
    )


def plainvit() -> Workload:
    """The same in torch's own modules, where there is no timm."""
    from benchmarks.models_vit import Block, Shape, VisionTransformer

    images = sized(64, 2)
    shape = sized(Shape(), Shape(width=64, layers=2, heads=4, side=64))
    model: Any = VisionTransformer(shape, CLASSES)
    return Workload(
        model,
        (Block,),
        pictures(images, sized(16, 2), shape.side),
        lambda batch: model(batch.inputs),
        class_loss,
        blocks=tuple(model.blocks),
        elements=images * shape.tokens * shape.width * shape.layers,
    )


def convnext() -> Workload:
    import timm
    from timm.models.convnext import ConvNeXtBlock

    name = sized("convnext_base", "convnext_tiny")
    small: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)}
    # The default, 1e-6, hides what blocks do to gradients.
    options = {"ls_init_value": 0.5, **sized({}, small)}
    model: Any = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    blocks = tuple(module for module in model.modules() if isinstance(module, ConvNeXtBlock))
    draw = pictures(sized(128, 2), sized(16, 2), sized(224, 64))
    return Workload(
        model, (ConvNeXtBlock,), draw, lambda batch: model(batch.inputs), class_loss, blocks=blocks
    )


def cnn(
    images: int | None = None, memory_format: torch.memory_format = torch.contiguous_format
) -> Workload:
    """ResNet-50; `images`: of the large batch; `memory_format`: of its weights and activations."""
    from torchvision.models import resnet18, resnet50
    from torchvision.models.resnet import BasicBlock, Bottleneck

    model: Any = sized(resnet50, resnet18)(num_classes=CLASSES).to(memory_format=memory_format)
    kinds = (BasicBlock, Bottleneck)
    blocks = tuple(module for module in model.modules() if isinstance(module, kinds))
    # Not smaller: a batch norm of two values is as wrong as it can be, whatever is done to it.
    draw = pictures(images or sized(96, 4), sized(16, 4), sized(224, 64))
    return Workload(
        model, (model,), draw, lambda batch: model(batch.inputs), class_loss, blocks=blocks
    )


def unet3d() -> Workload:
    from benchmarks.models_unet3d import UNet3d, draw_volumes, voxel_loss

    model = UNet3d(width=sized(32, 4), depth=sized(4, 2))
    # 4 voxels a side at the bottom: of 2, oneDNN's weight gradient in bfloat16 reads memory that
    # nobody wrote, with 16 channels or more (torch 2.13's processor build).
    draw = draw_volumes(sized((2, 128), (1, 16)), sized((1, 32), (1, 16)))
    return Workload(model, (model,), draw, lambda batch: model(batch.inputs), voxel_loss)


def gnn() -> Workload:
    from torch_geometric.nn import GraphSAGE

    features = sized(256, 16)
    model: Any = GraphSAGE(features, sized(512, 32), num_layers=3, out_channels=CLASSES)

    def draw(generator: torch.Generator, is_large: bool) -> Batch:
        nodes = sized(150_000, 60) if is_large else sized(8_000, 60)
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        x = torch.randn(nodes, features, **options)
        edges = torch.randint(0, nodes, (2, 8 * nodes), **options)
        return Batch((x, edges), x[:, :CLASSES].argmax(1))

    def forward(batch: Batch) -> Tensor:
        scores: Tensor = model(*batch.inputs)
        return scores

    return Workload(model, (model,), draw, forward, class_loss, is_autocast=False)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    builder.__name__: builder for builder in (llama, gpt2, bert, vit, plainvit, cnn, unet3d, gnn)
}


def build(name: str, device: torch.device, seed: int) -> Workload:
    """Build a model of WORKLOADS on a device, its weights drawn there."""
    return build_by(WORKLOADS[name], device, seed)


def build_by(builder: Callable[[], Workload], device: torch.device, seed: int) -> Workload:
    """Build what a builder makes on a device, its weights drawn there."""
    torch.manual_seed(seed)
    with device:
        workload = builder()
    workload.model.to(device).train()
    return workload
