"""Blocks of another release or with another forward under vramx.optimize, and verification."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import pytest
from optimize_tools import (
    HUGGING_FACE,
    INT8_NOISE,
    LAYERS,
    ROUNDING,
    any_model,
    assert_computes,
    cache_word,
    error,
    gradient_of,
    hugging_face,
    optimised_copy,
    result_of,
    twin,
)
from test_nn_optimize_models import UNKNOWN, VERSION, transformers

import vramx
from vramx.errors import VramxWarning

pytestmark = pytest.mark.usefixtures("seeded")


def test_attention_of_another_kind_is_called_as_it_is() -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    model.config._attn_implementation = "flex_attention"
    report = vramx.optimize(model, "keep")
    assert "its attention is 'flex_attention'" in str(report)
    attention = model.model.layers[0].self_attn
    seen: list[int] = []
    forward = type(attention).forward
    attention.forward = lambda *a, **k: seen.append(1) or forward(attention, *a, **k)
    model.config._attn_implementation = "sdpa"
    assert error(result_of(model, inputs), result_of(original, inputs)) < ROUNDING
    assert seen == [1]


def test_block_of_a_release_with_other_arguments_is_left(monkeypatch: Any) -> None:
    model, _ = hugging_face(transformers, "llama")
    cls = type(model.model.layers[0])

    def forward(self: Any, hidden_states: Any, surprise: Any = None) -> Any: ...

    forward.__module__ = cls.__module__
    monkeypatch.setattr(cls, "forward", forward)
    with pytest.warns(VramxWarning, match=f"LlamaDecoderLayer of transformers {VERSION} is left"):
        report = vramx.optimize(model)
    assert {row.module for row in report.swapped} == {"LlamaRMSNorm", "Linear"}
    assert "its forward takes surprise: not known" in str(report)


def test_cache_argument_may_have_any_name(monkeypatch: Any) -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    cls = type(model.model.layers[0])
    theirs, word = cls.forward, cache_word(model)

    def forward(
        self: Any, hidden_states: Any, attention_mask: Any = None, position_ids: Any = None,
        memory: transformers.Cache | None = None, use_cache: Any = False,
        position_embeddings: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        given = {word: kwargs.pop(word, memory), "use_cache": use_cache}
        others = {"attention_mask": attention_mask, "position_ids": position_ids, **given}
        others["position_embeddings"] = position_embeddings
        return theirs(self, hidden_states, **others, **kwargs)

    forward.__module__ = cls.__module__
    monkeypatch.setattr(cls, "forward", forward)
    report = vramx.optimize(model, "keep")
    assert [row.module for row in report.swapped].count(cls.__name__) == LAYERS
    assert_computes(model, original, inputs, fused=LAYERS)


@pytest.mark.parametrize("part", ["layer", "attention", "mlp", "norm"])
def test_block_that_computes_something_else_is_left(part: str, monkeypatch: Any) -> None:
    """And a part of it that does is called as it is, where the release lets it be."""
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    layer = model.model.layers[0]
    parts = {"layer": layer, "attention": layer.self_attn, "mlp": layer.mlp}
    cls = type({**parts, "norm": layer.input_layernorm}[part])
    theirs = cls.forward

    @functools.wraps(theirs)  # its arguments, and its module
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = theirs(self, *args, **kwargs)
        return (1.5 * found[0], *found[1:]) if isinstance(found, tuple) else 1.5 * found

    monkeypatch.setattr(cls, "forward", forward)
    said = pytest.warns(VramxWarning, match="of a small one of its class, its result differs")
    with said if part == "layer" else contextlib.nullcontext():
        report = vramx.optimize(model, "keep")
    if part == "layer":
        assert not [row for row in report.swapped if row.module == "LlamaDecoderLayer"]
    assert_computes(model, original, inputs)


@pytest.mark.parametrize("name", UNKNOWN)
def test_block_of_an_unknown_release_is_left_with_a_warning(name: str) -> None:
    original, inputs = any_model(transformers, name)
    model = twin(original)
    with pytest.warns(VramxWarning, match=f"of transformers {VERSION} is left as it was"):
        report = vramx.optimize(model)
    assert not [row for row in report.swapped if row.name != "lm_head"]
    assert error(result_of(model, inputs), result_of(original, inputs)) == 0


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_verification_accepts_every_model(name: str, checkpointed: bool) -> None:
    original, inputs = hugging_face(transformers, name)
    model = optimised_copy(original, verify=True)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error", VramxWarning)
        warnings.filterwarnings("ignore", "blocks are checkpointed by the model", VramxWarning)
        # It verifies calls without a cache only, which not all models take an argument for.
        model.config.use_cache = False
        gradient = gradient_of(model, inputs)
    blocks = [module for module in model.modules() if hasattr(module, "vramx_settings")]
    assert len(blocks) >= LAYERS
    assert not any(block.vramx_settings.unverified for block in blocks)
    assert error(gradient, gradient_of(original, inputs)) < INT8_NOISE
