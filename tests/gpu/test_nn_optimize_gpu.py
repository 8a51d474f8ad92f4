"""vramx.optimize on a GPU: what is held between forward and backward, verification, compilation.

What every family computes is in test_nn_optimize_families_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
from norm_tools import held_bytes
from optimize_tools import LAYERS, error, gradient_of, hugging_face, twin

import vramx

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

# bfloat16 rounds by half a step some thirty times in a row in each layer, independently, and both
# ways do; the norm of a difference of two such results, with a margin of two.
ROUNDING = 2 * 2**0.5 * torch.finfo(torch.bfloat16).eps / 2 * (30 * LAYERS) ** 0.5


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
    # 134 bytes for 128 elements: of two norms' inputs, values, and a gated unit's two. q and k are
    # in bfloat16; norms and attention keep a float a row.
    packed = 134 / 128
    attended = (2 + 1 / 4) * packed + 2 * (1 + 1 / 4)
    assert attended + 7 * packed <= bytes_kept() < attended + 7 * packed + 0.2 < before
    vramx.optimize(block, "recompute_mlp")
    assert attended <= bytes_kept() < attended + 0.2


def test_verification_accepts_the_kernels() -> None:
    transformers = pytest.importorskip("transformers")
    model, inputs = hugging_face(transformers, "llama")
    model = model.cuda().bfloat16()
    model.config.use_cache = False
    before = vramx.optimize(model, verify=True).swapped
    model(**{k: v.cuda() for k, v in inputs.items()})
    assert len(vramx.restore(model)) == len(before) + 1  # of a head's loss the model has a part


def test_compiled_model_computes_what_the_original_does() -> None:
    transformers = pytest.importorskip("transformers")
    original, inputs = hugging_face(transformers, "llama")
    original = original.cuda().bfloat16()
    original.config.use_cache = False
    inputs = {k: v.cuda() for k, v in inputs.items()}
    expected = gradient_of(original, inputs)
    model = twin(original)
    vramx.optimize(model, "keep")
    compiled = torch.compile(model, fullgraph=True)
    assert error(gradient_of(compiled, inputs), expected) < ROUNDING
