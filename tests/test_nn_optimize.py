"""vramx.optimize on torch's own encoder layers: the API, what stays, and what goes its old way."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import pytest
import torch
from interpreted_nn import interpreted_nn
from norm_tools import held_bytes
from optimize_tools import (
    INT8_NOISE,
    LAYERS,
    ROUNDING,
    TOKENS,
    assert_computes,
    encoder,
    encoder_inputs,
    error,
    fused_calls,
    gradient_of,
    optimised_copy,
    result_of,
    twin,
)
from torch import nn

import vramx
from vramx.errors import InvalidValueError, VramxWarning
from vramx.nn import products
from vramx.nn.families.encoder import EncoderLayer
from vramx.nn.families.small import randomised
from vramx.nn.families.swap import Fusing, Settings
from vramx.recompute import objects

pytestmark = pytest.mark.usefixtures("seeded")

INPUTS = encoder_inputs()


@pytest.mark.parametrize("norm_first", [True, False])
def test_kernels_compute_the_gradients_of_an_encoder_layer(norm_first: bool) -> None:
    """As Triton interprets them, at the shapes of a model's blocks."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=norm_first)
    x, incoming = torch.randn(2, 2, 5, 64)
    found = interpreted_nn().step(layer, x, incoming)
    layer(x.requires_grad_()).backward(incoming)
    # Some ten operations follow each other, each a sum of up to 128 float32 terms in another
    # order: so many roundings, whose signs are random.
    bound = 10 * 128**0.5 * 2**-24
    for ours, right in zip(found, (x, *layer.parameters()), strict=True):
        assert right.grad is not None
        assert error(ours, right.grad) <= bound


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp", "recompute_all"])
def test_encoder_layers_compute_what_their_originals_do(norm_first: bool, level: str) -> None:
    original = encoder(norm_first=norm_first)
    assert_computes(optimised_copy(original, level), original, INPUTS, level, LAYERS)


def test_the_last_product_of_a_block_is_not_computed_again(monkeypatch: Any) -> None:
    made, product = list[int](), products.F.linear
    stand_in = types.SimpleNamespace(linear=lambda *args: made.append(1) or product(*args))
    monkeypatch.setattr(products, "F", stand_in)
    model = encoder(norm_first=True, dropout=0.0)
    vramx.optimize(model, "recompute_all")
    made.clear()  # the first time a class is swapped a small one is tried
    y = result_of(model, INPUTS)
    assert len(made) == LAYERS
    y.sum().backward()
    assert len(made) == LAYERS
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_bound_of_8_bits_is_too_narrow_for_coarser_codes() -> None:
    original = encoder(norm_first=True)
    model = optimised_copy(original, level="int4", symmetric=True, group_size=1024)
    assert error(gradient_of(model, INPUTS), gradient_of(original, INPUTS)) > INT8_NOISE


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
PADDING = (torch.arange(TOKENS) >= TOKENS - 3) & torch.tensor([[False], [True]])
MASKS: dict[str, dict[str, Any]] = {
    "bool": {"mask": CAUSAL, "src_key_padding_mask": PADDING},
    "float": {"mask": torch.zeros(TOKENS, TOKENS).masked_fill_(CAUSAL, float("-inf"))},
    "causal": {"mask": CAUSAL, "is_causal": True},
}


@pytest.mark.parametrize("masks", MASKS)
def test_masks_of_encoder_layers_are_honoured(masks: str) -> None:
    original = encoder(norm_first=True)
    model = optimised_copy(original, "keep")
    inputs = {**INPUTS, **MASKS[masks]}
    assert_computes(model, original, inputs, fused=LAYERS)
    assert error(result_of(model, inputs), result_of(original, INPUTS)) > 0.01


@pytest.mark.parametrize("last", ["int4", "recompute_mlp"])
def test_each_level_keeps_less_than_the_one_before(last: str) -> None:
    held = []
    for level in ("left", "keep", "int8", last):
        model = encoder(norm_first=True)
        vramx.optimize(model, level)
        held.append(held_bytes(functools.partial(model, **INPUTS), *model.parameters()))
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 4


def test_parameters_names_classes_and_state_stay() -> None:
    model = encoder()
    names, parameters = list(model.state_dict()), list(model.parameters())
    vramx.optimize(model)
    layer = model.layers[0]
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(layer, nn.TransformerEncoderLayer)
    assert type(layer).__name__ == "TransformerEncoderLayer"
    assert type(layer) is type(model.layers[1]) is not nn.TransformerEncoderLayer


@pytest.mark.parametrize("how", ["inference_mode", "eval", "integers"])
def test_calls_that_do_not_train_go_the_original_way(how: str) -> None:
    original = encoder().train(how != "eval")
    model = optimised_copy(original)
    with fused_calls() as calls, torch.inference_mode(how == "inference_mode"):
        if how == "integers":
            with pytest.raises(RuntimeError):
                model(src=INPUTS["src"].long())
        else:
            assert torch.equal(result_of(model, INPUTS), result_of(original, INPUTS))
    assert calls == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_passes_without_gradients_compile_whole(mode: Any) -> None:
    model = optimised_copy(encoder())
    with mode():
        found = result_of(torch.compile(model, backend="aot_eager", fullgraph=True), INPUTS)
    assert error(found, result_of(model, INPUTS)) < ROUNDING


@pytest.mark.parametrize("part", ["linear1", "norm2"])
@pytest.mark.parametrize("first", ["hook", "optimise"])
def test_part_with_a_hook_is_called_as_it_is_and_reported(first: str, part: str) -> None:
    original = encoder(norm_first=True)
    model, seen = twin(original), list[int]()
    if first == "optimise":
        vramx.optimize(model, "recompute_mlp")
    getattr(model.layers[0], part).register_forward_hook(lambda *_: seen.append(1))
    if first == "hook":
        report = vramx.optimize(model, "keep")
        hooked = [(row.name, row.done) for row in report.left if "hooks" in row.reason]
        assert hooked == [(f"layers.0.{part}", "left")]
    assert error(result_of(model, INPUTS), result_of(original, INPUTS)) < ROUNDING
    assert seen == [1]


class Doubled(nn.TransformerEncoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


class Wrapped(nn.Linear):
    """Stands for a Linear that is quantised or has an adapter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def test_subclass_and_block_with_another_forward_are_left() -> None:
    plain = encoder().layers[0]
    plain.forward = lambda *args, **kwargs: type(plain).forward(plain, *args, **kwargs)
    model = nn.Sequential(Doubled(64, 4, 64, batch_first=True), plain)
    report = vramx.optimize(model)
    assert report.swapped == ()
    assert "its forward was replaced" in str(report)


@pytest.mark.parametrize(("level", "done"), [("keep", "keep"), ("recompute_mlp", "int8")])
def test_linear_of_another_class_is_called_as_it_is_and_not_recomputed(
    level: str, done: str
) -> None:
    original = encoder(norm_first=True)
    original.layers[0].linear1 = Wrapped(64, 128)
    model = twin(original)
    report = vramx.optimize(model, level)
    assert [row.done for row in report.swapped] == [done, level]
    assert ("not recomputed" in report.swapped[0].reason) == (level == "recompute_mlp")
    assert "layers.0.linear1" in [row.name for row in report.left]
    assert_computes(model, original, INPUTS, level)


def test_dropout_drops_and_scales_as_asked() -> None:
    model = encoder(0.5, norm_first=True)
    vramx.optimize(model, "int8")
    different = error(result_of(model, INPUTS), result_of(model, INPUTS))
    assert different > 0.1
    vramx.restore(model)
    assert 0.5 < different / error(result_of(model, INPUTS), result_of(model, INPUTS)) < 2


def test_autocast_computes_as_the_original_does() -> None:
    original = encoder(norm_first=True)
    model = optimised_copy(original, "keep")
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = result_of(model, INPUTS), result_of(original, INPUTS)
    assert y.dtype == expected.dtype
    # Some twenty roundings of bfloat16 in each layer, independent: half a step times their root.
    bound = torch.finfo(torch.bfloat16).eps / 2 * (20 * LAYERS) ** 0.5
    assert error(y.float(), expected.float()) < bound


def test_patterns_choose_levels_by_name() -> None:
    model = encoder()
    report = vramx.optimize(model, {"layers.0": "int4", "layers.*": "left"}, rounding="nearest")
    assert [(row.name, row.done) for row in report.swapped] == [("layers.0", "int4")]
    assert ("layers.1", "its level says so") in [(row.name, row.reason) for row in report.left]
    assert model.layers[0].vramx_settings.keep.rounding == "nearest"


@pytest.mark.parametrize(
    "options",
    [{"level": "int9"}, {"level": {"*": "fast"}}, {"bit": 8}, {"level": "int3"}, {"keep": 8}],
)
def test_unknown_option_is_an_error_and_changes_nothing(options: dict[str, Any]) -> None:
    model = encoder()
    vramx.optimize(model)
    with pytest.raises(InvalidValueError):
        vramx.optimize(model, **options)
    assert len(vramx.restore(model)) == LAYERS


def test_verification_passes_what_is_right_and_leaves_no_trace() -> None:
    gradients = []
    for verify in (True, False):
        torch.manual_seed(0)
        model = encoder(0.1, norm_first=True)
        vramx.optimize(model, "keep", verify=verify)
        src = INPUTS["src"].clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(src=src).sum().backward()
        gradients.append(src.grad)
        assert all(child.training for child in model.modules())
        assert not model.layers[0].vramx_settings.unverified
    # The same masks of dropout: no random state was used.
    assert torch.equal(*gradients)


RIGHT = EncoderLayer.vramx_fused
WRONG: dict[str, Any] = {
    "result": lambda self, x, **how: RIGHT(self, x, **how) + 0.5 * x.detach(),
    "gradient": lambda self, x, **how: RIGHT(self, x.detach() + 0.5 * (x - x.detach()), **how),
}


@pytest.mark.parametrize("what", WRONG)
def test_verification_restores_a_block_that_is_wrong(what: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(EncoderLayer, "vramx_fused", WRONG[what])
    model = encoder(norm_first=True)
    src = {"src": INPUTS["src"].clone().requires_grad_()}
    expected = result_of(model, src)
    vramx.optimize(model, verify=True)
    with pytest.warns(VramxWarning, match=f"its {what} differs"):
        assert torch.equal(result_of(model, src), expected)
    assert type(model.layers[0]) is nn.TransformerEncoderLayer


def test_verification_that_ran_out_of_memory_is_made_up_for(monkeypatch: Any) -> None:
    def runs_out(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model = encoder(norm_first=True)
    vramx.optimize(model, verify=True)
    monkeypatch.setattr(EncoderLayer, "vramx_fused", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        result_of(model, INPUTS)
    monkeypatch.setattr(EncoderLayer, "vramx_fused", WRONG["result"])
    with pytest.warns(VramxWarning, match="its result differs"):
        result_of(model, INPUTS)
    assert type(model.layers[0]) is nn.TransformerEncoderLayer


def test_no_call_of_a_recomputed_block_copies_how_it_is_optimised(monkeypatch: Any) -> None:
    copied, copy = list[type](), objects.Copier._copied
    monkeypatch.setattr(
        objects.Copier, "_copied", lambda self, x: copied.append(type(x)) or copy(self, x)
    )
    block = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True).train()
    assert vramx.optimize(block, "recompute_all").swapped
    x = torch.randn(2, 4, 32, requires_grad=True)
    for _ in range(2):
        block(x).sum().backward()
    assert Fusing not in copied
    assert Settings not in copied


def test_masks_of_a_small_module_stay_as_they_are() -> None:
    """Attention of some models has its mask in a buffer `bias`."""
    module, mask = nn.Module(), torch.ones(2, 2, dtype=torch.bool).tril()
    module.register_buffer("bias", mask.clone())
    assert torch.equal(randomised(module).get_buffer("bias"), mask)
