"""vramx.optimize on a GPU: results and gradients in bfloat16, what is held, graphs of the compiler.

The formulas are compared in float32 on the host; here is what only a GPU shows: the kernels in
their places, attention's kernels, and the memory that is held between forward and backward.
"""

from __future__ import annotations

import pytest
import torch
from norm_tools import held_bytes
from optimize_tools import (
    HUGGING_FACE,
    INT8_NOISE,
    LAYERS,
    fused_calls,
    gradient_of,
    hugging_face,
    twin,
)
from torch import Tensor, nn

import vramx

pytestmark = pytest.mark.gpu

# bfloat16 rounds by half a step some thirty times in a row in each layer, independently, and both
# ways do; the norm of a difference of two such results, with a margin of two.
ROUNDING = 2 * 2**0.5 * torch.finfo(torch.bfloat16).eps / 2 * (30 * LAYERS) ** 0.5


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    vramx.manual_seed(0, rank=0)


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float()
    return ((found - expected).norm() / expected.norm()).item()


def gradient(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    model.zero_grad()
    y = model(**inputs)[0]
    # The weights of gradient_of().
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.device)
    (y.float() * weights).sum().backward()
    found = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp", "recompute_all"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_gradients_are_no_further_from_float32_than_the_originals(name: str, level: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, inputs = hugging_face(transformers, name)
    exact = gradient_of(twin(model).double().train(), to_double(inputs)).cuda()
    inputs = {k: v.cuda().to(kind(v)) for k, v in inputs.items()}
    original = model.cuda().bfloat16()
    optimised = twin(original)
    vramx.optimize(optimised, level)
    with fused_calls() as calls:
        found = gradient(optimised, inputs)
    assert len(calls) >= LAYERS
    codec = 0 if level == "keep" else INT8_NOISE
    assert error(found, exact) < 2 * error(gradient(original, inputs), exact) + codec


def kind(tensor: Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_floating_point() else tensor.dtype


def to_double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def test_llama_block_holds_the_bytes_of_its_packs() -> None:
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    hidden, tokens = 1024, 512
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=7 * hidden // 2, num_attention_heads=8,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    block = modeling.LlamaDecoderLayer(config, 0).cuda().bfloat16().train()
    x = torch.randn(2, tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    positions = modeling.LlamaRotaryEmbedding(config).cuda()(x, torch.arange(tokens)[None].cuda())
    apart = [*positions, *block.parameters()]

    def bytes_kept() -> float:
        return held_bytes(lambda: block(x, position_embeddings=positions), *apart) / x.numel()

    before = bytes_kept()
    vramx.optimize(block, verify=True)
    assert 12 < bytes_kept() < 14.5 < before
    vramx.optimize(block, "recompute_mlp")
    assert 5.5 < bytes_kept() < 6.5


def test_verification_accepts_the_kernels() -> None:
    transformers = pytest.importorskip("transformers")
    model, inputs = hugging_face(transformers, "llama")
    model = model.cuda().bfloat16()
    model.config.use_cache = False
    before = vramx.optimize(model, verify=True).swapped
    model(**{k: v.cuda() for k, v in inputs.items()})
    assert vramx.restore(model) == len(before)


def test_compiled_model_computes_what_the_original_does() -> None:
    transformers = pytest.importorskip("transformers")
    original, inputs = hugging_face(transformers, "llama")
    original = original.cuda().bfloat16()
    original.config.use_cache = False
    inputs = {k: v.cuda() for k, v in inputs.items()}
    expected = gradient(original, inputs)
    model = twin(original)
    vramx.optimize(model, "keep")
    compiled = torch.compile(model, fullgraph=True)
    assert error(gradient(compiled, inputs), expected) < ROUNDING
