"""What the tests of vramx.optimize share: models by name, gradients, errors, ways of calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from norm_tools import INT8_STEP, error, held_bytes
from torch import Tensor, nn

import vramx
from vramx.nn.families import FAMILIES
from vramx.nn.families.norms import RmsNorm
from vramx.nn.families.swap import Fused, Fusing
from vramx.patch.module import find

HIDDEN, TOKENS, LAYERS = 64, 24, 2
# float32: a block rounds about twenty times in a row, each by half a step, and sums of some
# hundred terms are added in another order; 64 steps of the type are ten times what is seen.
ROUNDING = 64 * torch.finfo(torch.float32).eps
# int8, stochastic: an element is off by half a step at most in the root mean square, and a group's
# largest magnitude is below 4 deviations. So a pack is off by a part of INT8_STEP * 4 / 2 = 1.6 %.
# A gradient passes through the at most 8 packs of each block, with independent errors.
INT8_NOISE = INT8_STEP * 4 / 2 * (8 * LAYERS) ** 0.5
Inputs = dict[str, Tensor]

_TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
_DECODERS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_DECODERS["gemma"] = "Gemma"
DECODERS = tuple(_DECODERS)
HUGGING_FACE = (*DECODERS, "gpt2", "bert", "vit")
# Whose blocks transformers 4 has of another kind, which is left as it is.
NEW_IN_5 = ("gpt2", "bert", "vit")
CONVOLUTIONS = ("convnext", "resnet")
EVERY_FAMILY = (*HUGGING_FACE, "timm_vit", "encoder", *CONVOLUTIONS)
# Blocks of a model, where they are not LAYERS.
BLOCKS = {"convnext": 4, "resnet": 4}


def encoder(dropout: float = 0.0, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        HIDDEN, 4, 2 * HIDDEN, dropout, activation="gelu", batch_first=True, **options
    )
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).train()


def encoder_inputs() -> Inputs:
    return {"src": torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))}


def decoder(transformers: Any, name: str = "llama", **options: Any) -> nn.Module:
    prefix = _DECODERS[name]
    config = getattr(transformers, f"{prefix}Config")(
        **_TEXT, num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **options
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{prefix}ForCausalLM")(config)
    return model.train()


def cache_word(model: nn.Module) -> str:
    """Return what a release calls the cache, in calls and in results."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def hugging_face(transformers: Any, name: str, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """Return a small model and its inputs; skip one whose blocks are not known in this release."""
    if name in NEW_IN_5 and transformers.__version__.startswith("4."):
        pytest.skip(f"the block of {name} in transformers {transformers.__version__} is not known")
    return any_model(transformers, name, dropout)


def any_model(transformers: Any, name: str, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    generator = torch.Generator().manual_seed(1)
    ids = {"input_ids": torch.randint(3, 50, (2, TOKENS), generator=generator)}
    if name in DECODERS:
        return decoder(transformers, name), ids
    torch.manual_seed(0)
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**_TEXT, **drop)).train(), ids
    if name == "gpt2":
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        config = transformers.GPT2Config(
            n_embd=HIDDEN, n_head=4, n_layer=LAYERS, vocab_size=50, bos_token_id=1,
            eos_token_id=2, **drop
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).train(), ids
    sizes = {k: _TEXT[k] for k in list(_TEXT)[:4]}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, **drop)
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    return transformers.ViTModel(config).train(), {"pixel_values": pixels}


def timm_vit(**options: Any) -> nn.Module:
    timm: Any = pytest.importorskip("timm.models")
    model: nn.Module = timm.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=HIDDEN, depth=LAYERS, num_heads=4, num_classes=8,
        **options,
    ).train()  # fmt: skip
    return model


def family(name: str) -> tuple[nn.Module, Inputs]:
    """Return a small model of one of EVERY_FAMILY and its inputs; skip without its library."""
    if name in HUGGING_FACE:
        return hugging_face(pytest.importorskip("transformers"), name)
    if name == "encoder":
        return encoder(), encoder_inputs()
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    if name == "timm_vit":
        return timm_vit(), {"x": torch.randn(2, 3, 16, 16, generator=generator)}
    images = torch.randn(8, 3, 64, 64, generator=generator).to(memory_format=torch.channels_last)
    if name == "resnet":
        resnet: Any = pytest.importorskip("torchvision.models.resnet")
        model = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=8)
    else:
        timm: Any = pytest.importorskip("timm.models")
        # The usual scale of a branch, a millionth, would hide all errors of it.
        model = timm.ConvNeXt(
            num_classes=8, depths=(1, 1, 1, 1), dims=(16, 32, 64, 128), ls_init_value=0.5
        )
    return model.to(memory_format=torch.channels_last).train(), {"x": images}


def llama_block(
    hidden: int = 512, rows: int = 1, tokens: int = 128, device: str = "cpu"
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a block in bfloat16, of four queries to a key, and a call of it; skip without one."""
    modeling: Any = pytest.importorskip("transformers.models.llama.modeling_llama")
    heads = max(8, hidden // 128)
    config = modeling.LlamaConfig(
        hidden_size=hidden, intermediate_size=7 * hidden // 2, num_attention_heads=heads,
        num_key_value_heads=heads // 4, attn_implementation="sdpa",
    )  # fmt: skip
    block = modeling.LlamaDecoderLayer(config, 0).to(device).bfloat16().train()
    x = torch.randn(rows, tokens, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    # One pair for all layers of a model.
    rotary = modeling.LlamaRotaryEmbedding(config).to(device)
    positions = rotary(x, torch.arange(tokens, device=device)[None])
    return block, {"hidden_states": x, "position_embeddings": positions}


def bytes_kept(block: nn.Module, call: dict[str, Any]) -> float:
    """Return the bytes that a block of Llama keeps for an element of its input."""
    apart = [*call["position_embeddings"], *block.parameters()]
    return held_bytes(lambda: block(**call), *apart) / call["hidden_states"].numel()


def result_of(model: nn.Module, inputs: Inputs) -> Tensor:
    result: Any = model(**inputs)
    return result if isinstance(result, Tensor) else result[0]


def gradient_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the gradient of a fixed weighting of the result for all parameters, in a row."""
    y = result_of(model, inputs)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((y * weights).sum(), parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def optimised_copy(original: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Return an optimised copy."""
    model = twin(original)
    vramx.optimize(model, *arguments, **options)
    return model


def assert_computes(
    model: nn.Module, original: nn.Module, inputs: Inputs, level: str = "keep", fused: int = -1
) -> None:
    """Hold a result and its gradients to what a level may lose, and count the fused blocks."""
    with fused_calls() as calls:
        y = result_of(model, inputs)
    assert fused in (-1, len(calls))
    assert error(y, result_of(original, inputs)) < ROUNDING
    bound = ROUNDING if level == "keep" else INT8_NOISE
    assert error(gradient_of(model, inputs), gradient_of(original, inputs)) < bound


def padded(inputs: Inputs, tokens: int = 5) -> Inputs:
    """Return a text of which the second row ends before the first."""
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -tokens:] = 0
    return {**inputs, "attention_mask": mask}


@contextmanager
def fused_calls() -> Iterator[list[str]]:
    """Collect the families of the blocks that were computed the fused way."""
    calls: list[str] = []
    blocks = [family for family in FAMILIES if not issubclass(family, RmsNorm)]
    bases = {base for family in blocks for base in family.__mro__ if base is not Fused}
    originals: dict[Any, Any] = {base: base.__dict__.get("vramx_fused") for base in bases}

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def count(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(find(self, Fusing).family.__name__)
            return function(self, *args, **kwargs)

        return count

    for family, function in originals.items():
        if function is not None:
            family.vramx_fused = counted(function)
    try:
        yield calls
    finally:
        for family, function in originals.items():
            if function is not None:
                family.vramx_fused = function
