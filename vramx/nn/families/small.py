"""Small modules of the families' classes, and calls of them, to see what an installed release does.

They are made by the library's own class, on the CPU, with random weights in which an error of any
part shows. What a family does with them is judged elsewhere (trial.py). Draws from generators of
its own, and from torch's within a fork of its state. Milliseconds each; seconds where a large
model's class has to be made without memory.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from vramx.nn.families.questions import cache_name_of
from vramx.patch.module import original_class

WIDTH, INNER, HEADS, HEAD, TOKENS, CLASSES = 16, 24, 4, 8, 5, 37
# What a config of a kind that is not known may have left as large as it was.
MOST_WEIGHTS = 1 << 22
Call = dict[str, Any]


def small_config(config: Any) -> Any:
    """Return a copy of a config of transformers with other sizes."""
    config = copy.deepcopy(config)
    heads = getattr(config, "num_attention_heads", HEADS)
    few = getattr(config, "num_key_value_heads", heads) != heads
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2 if few else HEADS,
        "head_dim": HEAD,
        "d_kv": HEAD,
    }
    for name, size in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        config._attn_implementation = "eager"
    for name in getattr(config, "sub_configs", ()):  # of images, say
        if (within := getattr(config, name, None)) is not None:
            with contextlib.suppress(AttributeError):  # what is a part of it under another name
                setattr(config, name, small_config(within))
    return config


def layer_of_transformers(cls: Any, like: Any) -> nn.Module:
    """Return a layer as `like` is, but for its sizes, by the config of its attention."""
    config = small_config(next(part.config for part in like.modules() if hasattr(part, "config")))
    numbered = "layer_idx" in inspect.signature(cls.__init__).parameters
    # Numbered as the original: some of a model's layers have a window, say.
    found = [i for part in like.modules() if (i := getattr(part, "layer_idx", None)) is not None]
    layer: nn.Module = cls(config, layer_idx=(found or [0])[0]) if numbered else cls(config)
    return layer


def language_model(like: Any) -> tuple[nn.Module, Call]:
    """Return a model with one layer, as `like` is but for its sizes, and a call with labels.

    Raises:
        ValueError: it would not be small.
    """
    cls, config = original_class(like), small_config(like.config)
    _set(config, num_hidden_layers=1, **_OF_A_TRIAL)
    if getattr(config, "layer_types", None):
        with contextlib.suppress(AttributeError):  # some make the list from the other numbers
            config.layer_types = config.layer_types[:1]
    with torch.device("meta"):
        _check_is_small(cls(copy.deepcopy(config)))
    return cls(config), call_with_labels()


def language_model_with_images(like: Any) -> tuple[nn.Module, Call]:
    """Return a model and a call as language_model() does, which has images: some need them.

    Raises:
        ValueError: it would not be small, or takes no images of a size that is known.
    """
    size: Any = getattr(getattr(like.config, "vision_config", None), "image_size", None)
    if not isinstance(size, int):
        raise ValueError("the size of its images is not known")
    model, call = language_model(like)
    return model, {**call, "pixel_values": images(len(call["input_ids"]), 3, size, size).detach()}


# A layer alone may be of a kind whose cache knows no length.
_OF_A_TRIAL = {"vocab_size": CLASSES, "pad_token_id": 0, "return_dict": True, "use_cache": False}


def _set(config: Any, **sizes: int) -> None:
    for name, size in sizes.items():
        if getattr(config, name, None) is not None:
            with contextlib.suppress(NotImplementedError):  # of one with several such numbers
                setattr(config, name, size)
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def _check_is_small(model: nn.Module) -> None:
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"of its config's other sizes, a small one has {count} weights")


def call_with_labels() -> Call:
    """Return ids and labels of two rows, one of which counts for nothing."""
    ids = torch.arange(1, 2 * TOKENS + 1).view(2, TOKENS)
    labels = ids.flip(0).clone()
    labels[1, 2] = -100
    return {"input_ids": ids, "labels": labels}


def of_transformers(
    module: nn.Module, *, cached: bool = False, turned: bool = False
) -> tuple[nn.Module, list[Call]]:
    """Return a small layer of a module's class, and calls of it with and without a mask.

    One more has a cache, if the layer is to be called with such and takes it.
    """
    layer: Any = layer_of_transformers(original_class(module), module)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS, WIDTH, generator=generator).requires_grad_()
    call: Call = {"hidden_states": x}
    if turned:
        size = layer.self_attn.head_dim
        angles = torch.randn(1, TOKENS, size // 2, generator=generator).repeat(1, 1, 2)
        call["position_embeddings"] = (angles.cos(), angles.sin())
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)
    calls = [{**call, "attention_mask": mask.repeat(2, 1, 1, 1)}, call]
    name = cache_name_of(layer) if cached else None
    if name is not None:
        cache: Any = sys.modules["transformers"].DynamicCache
        calls.append({**call, name: cache()})
    return layer, calls


def images(*shape: int) -> Tensor:
    """Return an input that learns."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def randomised(module: nn.Module) -> nn.Module:
    """Give a module weights and constants among which none is neutral, and let it train."""
    generator = torch.Generator().manual_seed(1)
    module.float().train()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Vectors are weights and biases of norms among others, most of them near one.
            parameter.copy_(noise * 0.3 + (parameter.dim() == 1))
        for name, buffer in module.named_buffers():
            word = name.rpartition(".")[2] if buffer.is_floating_point() else ""
            if word == "running_var":  # so small that what is added to it shows
                buffer.uniform_(0.01, 0.02, generator=generator)
            elif word in ("running_mean", "weight", "bias"):
                buffer.normal_(1.0, 0.3, generator=generator)
    return module
