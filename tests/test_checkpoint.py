"""vramx.checkpoint: torch's checkpoint in all but what it keeps of the inputs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import vramx
from vramx.compression import codec, enclosing
from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.recompute import inputs

SMALL = Compression(min_bytes=0)
WIDTH = 64


class Packs:
    """What the checkpoint's hooks packed, in order; holds no tensor."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.bytes = 0

    def pack(self, elements: torch.Tensor, *arguments: Any) -> codec.Packed:
        packed = codec.pack(elements, *arguments)
        self.sizes.append(elements.numel())
        self.bytes += packed.nbytes
        weakref.finalize(packed, self._released, packed.nbytes)
        return packed

    def _released(self, nbytes: int) -> None:
        self.bytes -= nbytes


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Packs:
    seen = Packs()
    monkeypatch.setattr(inputs, "pack", seen.pack)
    return seen


@pytest.fixture(autouse=True)
def seeds() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    """A residual block with dropout, whose activations are many times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = nn.functional.gelu(self.up(self.norm(x)))
        y = self.down(nn.functional.dropout(y, 0.1, training=True))
        return x + (y if scale is None else y * scale)


def activation(*shape: int) -> torch.Tensor:
    """Return a tensor as a region gets it: with a history, and nobody else's."""
    return torch.randn(*(shape or (32, WIDTH)), requires_grad=True) * 1.0


def gradients(run: Callable[[torch.Tensor], torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of a loss through `run` in module's parameters and in the input."""
    torch.manual_seed(1)
    leaf = torch.randn(32, WIDTH, requires_grad=True)
    module.zero_grad()
    run(leaf * 1.0).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()] + [leaf.grad]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def cosine(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    a, b = (torch.cat([t.flatten().double() for t in tensors]) for tensors in (left, right))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


# -- What is kept ---------------------------------------------------------------------------------


def test_input_is_kept_in_at_most_0_52_of_its_bytes(packs: Packs) -> None:
    x = activation(256, WIDTH).bfloat16()
    nbytes = x.numel() * x.element_size()
    storage = weakref.ref(x.untyped_storage())
    y = vramx.checkpoint(torch.sin, x, compress=SMALL)
    del x
    assert storage() is None, "the input itself is still alive"
    assert packs.bytes <= 0.52 * nbytes  # 8 bits and a 16-bit scale for 128 elements: 0.508
    assert y.grad_fn is not None


def test_gradient_direction_survives_compression() -> None:
    block = Block()
    exact = gradients(block, block)
    packed = gradients(lambda x: vramx.checkpoint(block, x, compress=SMALL), block)
    # The promise of 8 bits; the next test shows a defect that this measure finds.
    assert cosine(exact, packed) > 0.999
    assert not same(exact, packed), "nothing was compressed"


def test_gradient_direction_is_a_measure_that_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block()
    exact = gradients(block, block)
    unpack = codec.unpack
    monkeypatch.setattr(inputs, "unpack", lambda packed: unpack(packed).roll(1))
    packed = gradients(lambda x: vramx.checkpoint(block, x, compress=SMALL), block)
    assert cosine(exact, packed) < 0.999


def test_keyword_and_nested_tensors_are_packed(packs: Packs) -> None:
    def region(x: torch.Tensor, *, pair: dict[str, Any]) -> torch.Tensor:
        return x * pair["a"][0] * pair["b"]

    pair = {"a": [activation(8, 16)], "b": activation(8, 16)}
    vramx.checkpoint(region, activation(8, 16), pair=pair, compress=SMALL).sum().backward()
    assert packs.sizes == [128, 128, 128]


@dataclasses.dataclass(frozen=True)
class Arguments:
    x: torch.Tensor
    name: str
    rest: tuple[Any, ...] = ()


def test_tensors_in_a_dataclass_are_packed_and_given_back(packs: Packs) -> None:
    seen = []

    def region(arguments: Arguments) -> torch.Tensor:
        seen.append(arguments)
        return arguments.x.sin() * arguments.rest[0].x

    inner = Arguments(activation(8, 16), "inner")
    vramx.checkpoint(
        region, Arguments(activation(8, 16), "outer", (inner,)), compress=SMALL
    ).sum().backward()
    assert packs.sizes == [128, 128]
    assert [a.name for a in seen] == ["outer", "outer"]
    assert seen[1].rest[0].name == "inner"
    assert seen[1].x.shape == (8, 16)


def test_integers_masks_parameters_and_small_tensors_pass(packs: Packs) -> None:
    weight = nn.Parameter(torch.randn(16, 16))
    index, mask = torch.arange(8), torch.ones(8, 16, dtype=torch.bool)

    def region(*tensors: torch.Tensor) -> torch.Tensor:
        x, w, i, m = tensors
        return (x[i] @ w).masked_fill(m, 0.0)

    x = activation(8, 16)  # 512 bytes
    options = Compression(min_bytes=513)
    vramx.checkpoint(region, x, weight, index, mask, compress=options).sum().backward()
    vramx.checkpoint(region, x.detach(), weight, index, mask, compress=SMALL).sum().backward()
    assert packs.sizes == []


def test_one_tensor_as_two_arguments_is_packed_once(packs: Packs) -> None:
    x = activation(8, 16)
    vramx.checkpoint(torch.mul, x, x, compress=SMALL).sum().backward()
    assert packs.sizes == [128]


@pytest.mark.parametrize("compress", [8, 4])
def test_a_transposed_input_has_its_strides_again(compress: int) -> None:
    strides = []

    def region(x: torch.Tensor) -> torch.Tensor:
        strides.append(x.stride())
        return x.sin()

    options = Compression(bits=compress, min_bytes=0)
    vramx.checkpoint(region, activation(8, 16).t(), compress=options).sum().backward()
    assert strides == [(1, 16), (1, 16)]


def test_nothing_is_left_once_the_graph_is_gone(packs: Packs) -> None:
    gc.collect()
    gc.disable()  # a cycle would be collected otherwise, sooner or later
    try:
        x = activation()
        vramx.checkpoint(Block(), x, compress=SMALL).sum().backward()
        dropped = vramx.checkpoint(Block(), x, compress=SMALL)
        del dropped
        assert packs.bytes == 0
    finally:
        gc.enable()


# -- Equal to torch -------------------------------------------------------------------------------


def test_without_compression_it_is_torch_bit_for_bit() -> None:
    block = Block()
    ours = gradients(lambda x: vramx.checkpoint(block, x, compress=None), block)
    theirs = gradients(lambda x: torch_checkpoint(block, x, use_reentrant=False), block)
    assert same(ours, theirs)


def test_outputs_are_exact_whatever_is_kept() -> None:
    block, x = Block(), activation()
    torch.manual_seed(1)
    exact = block(x)
    torch.manual_seed(1)
    assert torch.equal(vramx.checkpoint(block, x, compress=Compression(bits=4, min_bytes=0)), exact)


def test_dropout_is_recomputed_with_the_same_mask() -> None:
    x = activation(64, WIDTH).abs() + 1  # so that only dropout makes zeros
    leaf = torch.ones(64, WIDTH, requires_grad=True)
    y = vramx.checkpoint(lambda a, b: nn.functional.dropout(a * b, 0.5), x, leaf, compress=SMALL)
    y.sum().backward()
    assert torch.equal(leaf.grad != 0, y.detach() != 0)


def test_rng_state_is_not_restored_when_told_so() -> None:
    leaf = torch.ones(64, WIDTH, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * leaf, 0.5)

    y = vramx.checkpoint(region, activation(64, WIDTH), compress=SMALL, preserve_rng_state=False)
    torch.manual_seed(7)
    y.sum().backward()
    assert not torch.equal(leaf.grad != 0, y.detach() != 0)


def test_autocast_holds_in_the_recomputation() -> None:
    dtypes = []
    layer = nn.Linear(WIDTH, WIDTH)

    def region(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        dtypes.append(y.dtype)
        return y.float().sin()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = vramx.checkpoint(region, activation(), compress=SMALL)
    y.sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]


def count_calls(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls: list[int] = []

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append(1)  # past the last saved tensor: early stopping does not come here
        return result

    return counted, calls


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop_is_honoured(early_stop: bool) -> None:
    region, calls = count_calls(Block())
    y = vramx.checkpoint(region, activation(), compress=SMALL, early_stop=early_stop)
    y.sum().backward()
    assert len(calls) == (1 if early_stop else 2)


def test_the_context_for_early_stop_is_honoured() -> None:
    region, calls = count_calls(Block())
    with set_checkpoint_early_stop(False):
        y = vramx.checkpoint(region, activation(), compress=SMALL)
    y.sum().backward()
    assert len(calls) == 2


def test_selective_policy_composes() -> None:
    block, products = Block(), []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        products.extend([op] if keep else [])
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    exact = gradients(block, block)
    packed = gradients(
        lambda x: vramx.checkpoint(block, x, compress=SMALL, context_fn=contexts), block
    )
    assert products, "the policy was never asked"
    assert cosine(exact, packed) > 0.999


def test_debug_is_refused_together_with_a_policy_as_in_torch() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, [])
    with pytest.raises(ValueError, match="debug=True is incompatible"):
        vramx.checkpoint(Block(), activation(), compress=SMALL, debug=True, context_fn=contexts)


def test_an_unknown_determinism_check_is_refused_as_in_torch() -> None:
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        vramx.checkpoint(Block(), activation(), compress=SMALL, determinism_check="strong")


def test_retain_graph_recomputes_twice_and_gives_the_same() -> None:
    block, leaf = Block(), torch.randn(32, WIDTH, requires_grad=True)
    y = vramx.checkpoint(block, leaf * 1.0, compress=SMALL).square().sum()
    (first,) = torch.autograd.grad(y, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(y, leaf)
    assert torch.equal(first, second)


def test_an_input_changed_in_place_is_seen_where_it_was_kept() -> None:
    x = activation(8, 16)
    y = vramx.checkpoint(torch.sin, x, compress=Compression(min_bytes=1 << 20))
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_input_changed_in_place_does_no_harm_where_it_was_packed() -> None:
    x = activation(8, 16)
    leaf = torch.zeros(8, 16, requires_grad=True)
    y = vramx.checkpoint(torch.mul, x, leaf, compress=SMALL)
    expected = x.detach().clone()
    with torch.no_grad():
        x.fill_(float("nan"))
    y.sum().backward()
    # One step of 8 bits: 1/127 of the largest of a group, the scale rounded up by under 1 %.
    assert (leaf.grad - expected).abs().max() < 1.01 / 127 * expected.abs().max()


def test_arguments_in_forward_are_the_callers_own() -> None:
    given = {"x": activation(8, 16)}
    seen = []

    def region(argument: dict[str, torch.Tensor]) -> tuple[torch.Tensor, str]:
        seen.append(argument is given)
        return argument["x"].sin(), "text"

    y, text = vramx.checkpoint(region, given, compress=SMALL)
    y.sum().backward()
    assert (seen, text) == ([True, False], "text")


def test_region_without_gradient_in_its_inputs_trains_its_parameters() -> None:
    layer = nn.Linear(16, 16)
    vramx.checkpoint(layer, torch.randn(8, 16), compress=SMALL).sum().backward()
    assert layer.weight.grad is not None


def test_under_no_grad_it_is_a_plain_call(packs: Packs) -> None:
    with torch.no_grad():
        y = vramx.checkpoint(torch.sin, activation(8, 16), compress=SMALL)
    assert (y.requires_grad, packs.sizes) == (False, [])


# -- Other checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [torch_checkpoint, vramx.checkpoint])
def test_within_a_checkpoint_nothing_is_packed(outer: Callable[..., Any], packs: Packs) -> None:
    block = Block()

    def region(x: torch.Tensor) -> torch.Tensor:
        return vramx.checkpoint(block, x.sin(), compress=SMALL)

    own = {"compress": SMALL} if outer is vramx.checkpoint else {}
    x = activation()
    outer(region, x, use_reentrant=False, **own).sum().backward()
    assert packs.sizes == ([x.numel()] if own else []), (
        "the inner inputs are the outer's to recompute"
    )


def test_nested_checkpoints_give_the_gradient() -> None:
    first, second = Block(), Block()
    both = nn.Sequential(first, second)

    def region(x: torch.Tensor) -> torch.Tensor:
        return vramx.checkpoint(second, vramx.checkpoint(first, x, compress=SMALL), compress=SMALL)

    nested = gradients(lambda x: vramx.checkpoint(region, x, compress=SMALL), both)
    assert cosine(gradients(both, both), nested) > 0.999


def test_within_compress_inputs_are_packed_once_as_the_checkpoint_says(packs: Packs) -> None:
    block = Block()
    exact = gradients(block, block)

    def run(x: torch.Tensor) -> torch.Tensor:
        with vramx.compress(bits=4, min_bytes=0) as stats:
            y = vramx.checkpoint(block, x, compress=SMALL)
        assert stats.packed.tensors == 0, "the context packed what the checkpoint keeps"
        return y

    packed = gradients(run, block)
    assert packs.sizes == [32 * WIDTH]
    assert cosine(exact, packed) > 0.999


def test_within_compress_an_exact_checkpoint_is_exact(packs: Packs) -> None:
    block = Block()

    def run(x: torch.Tensor) -> torch.Tensor:
        with vramx.compress(min_bytes=0):
            return vramx.checkpoint(block, x, compress=None)

    assert same(gradients(block, block), gradients(run, block))
    assert packs.sizes == []


def test_a_checkpoint_is_seen_by_its_frames_where_torch_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, packs: Packs
) -> None:
    """As before torch 2.8."""
    monkeypatch.setattr(enclosing, "_top_hooks", None)
    block = Block()

    def region(x: torch.Tensor) -> torch.Tensor:
        return vramx.checkpoint(block, x.sin(), compress=SMALL)

    torch_checkpoint(region, activation(), use_reentrant=False).sum().backward()
    assert packs.sizes == []
    region(activation()).sum().backward()
    assert packs.sizes == [32 * WIDTH]


def flips(x: torch.Tensor) -> torch.Tensor:
    chosen = x[x.sum(1) > 0]
    return (chosen.sin() * chosen.cos()).sum()


def on_the_edge() -> torch.Tensor:
    """Return rows whose sums are so near to zero that rounding decides their sign."""
    x = torch.randn(256, 16)
    x[:, 0] -= x.sum(1) - 1e-6
    return x.requires_grad_() * 1.0


def test_shapes_that_change_by_compression_are_explained() -> None:
    y = vramx.checkpoint(flips, on_the_edge(), compress=SMALL)
    with pytest.raises(CheckpointError, match=r"different metadata[\s\S]*compress=None"):
        y.backward()


def test_shapes_do_not_change_without_compression() -> None:
    vramx.checkpoint(flips, on_the_edge(), compress=None).backward()


# -- Mistakes -------------------------------------------------------------------------------------


def test_reentrant_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="use_reentrant=True is not accepted: reentrant"):
        vramx.checkpoint(torch.sin, activation(), use_reentrant=True)


@pytest.mark.parametrize("compress", [True, 3, "8", 8.0])
def test_compress_is_checked(compress: Any) -> None:
    with pytest.raises(InvalidValueError, match="accepted are 8, 4, None"):
        vramx.checkpoint(torch.sin, activation(), compress=compress)


@pytest.mark.parametrize("offload", ["gpu", 1.5, -0.1])
def test_offload_is_checked(offload: Any) -> None:
    with pytest.raises(InvalidValueError, match="offload"):
        vramx.checkpoint(torch.sin, activation(), offload=offload)


def test_an_error_of_the_region_leaves_no_hooks_behind(packs: Packs) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        vramx.checkpoint(region, activation(), compress=SMALL)
    count = len(packs.sizes)
    activation().sin().sum().backward()
    assert len(packs.sizes) == count


def test_no_value_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Block(), activation()

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("waits for the device")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    vramx.checkpoint(block, x, compress=SMALL).sum().backward()


# -- Modules --------------------------------------------------------------------------------------


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)))


def test_modules_that_match_are_checkpointed(model: nn.Sequential, packs: Packs) -> None:
    before = gradients(model, model)
    handle = vramx.checkpoint_modules(model, where=Block, every=2, compress=SMALL)
    after = gradients(model, model)
    assert len(handle) == 2
    assert packs.sizes == [32 * WIDTH] * 2
    assert cosine(before, after) > 0.999


def test_names_state_and_classes_stay(model: nn.Sequential) -> None:
    before = (list(model.state_dict()), str(model), [type(m) for m in model.modules()])
    vramx.checkpoint_modules(model, where=(Block, nn.LayerNorm))
    assert (list(model.state_dict()), str(model), [type(m) for m in model.modules()]) == before


def test_removing_restores_the_instances_exactly(model: nn.Sequential) -> None:
    before = [dict(module.__dict__) for module in model]
    vramx.checkpoint_modules(model, where=Block).remove()
    vramx.checkpoint_modules(model, where=lambda module: isinstance(module, Block))
    assert vramx.uncheckpoint(model) == 4
    assert [dict(module.__dict__) for module in model] == before


def test_a_forward_of_the_instance_is_called_and_restored(packs: Packs) -> None:
    block = Block()
    block.forward = own = functools.partial(torch.sin)
    vramx.checkpoint_modules(block, where=Block, compress=SMALL)
    x = activation()
    assert torch.equal(block(x), x.sin())
    assert packs.sizes == [x.numel()]
    vramx.uncheckpoint(block)
    assert block.forward is own


def test_a_deep_copy_runs_its_own_parameters(model: nn.Sequential) -> None:
    vramx.checkpoint_modules(model, where=Block, compress=SMALL)
    clone = copy.deepcopy(model)
    clone(torch.randn(8, WIDTH)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in clone.parameters())
    assert vramx.uncheckpoint(clone) == 4


def test_a_checkpointed_model_can_be_pickled(model: nn.Sequential) -> None:
    vramx.checkpoint_modules(model, where=Block)
    x = torch.randn(8, WIDTH)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)


def test_keywords_with_names_of_ours_reach_the_module() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor, *, compress: int, debug: bool) -> torch.Tensor:
            return x.sin() * compress * debug

    module = Odd()
    vramx.checkpoint_modules(module, where=Odd, compress=SMALL)
    assert module(activation(), compress=2, debug=True).grad_fn is not None


def test_modules_are_not_checkpointed_twice(model: nn.Sequential) -> None:
    vramx.checkpoint_modules(model, where=lambda module: module is model[1])
    with pytest.raises(InvalidValueError, match="is checkpointed already"):
        vramx.checkpoint_modules(model, where=Block)
    assert vramx.uncheckpoint(model) == 1, "a refused call wrapped some"


def test_a_wrapper_over_ours_must_go_first(model: nn.Sequential) -> None:
    block = model[1]
    vramx.checkpoint_modules(model, where=Block)
    ours = block.forward
    block.forward = functools.wraps(ours)(functools.partial(ours))
    with pytest.raises(InvalidValueError, match="undo that first"):
        vramx.uncheckpoint(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"where": nn.Conv2d}, "matches no module; the model has"),
        ({"where": "Block"}, "accepted are a module class"),
        ({"where": Block, "every": 0}, "every 0"),
        ({"where": Block, "offlaod": "cpu"}, "'offlaod' is unknown"),
        ({"where": Block, "use_reentrant": True}, "use_reentrant=True"),
    ],
)
def test_mistakes_are_named(model: nn.Sequential, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        vramx.checkpoint_modules(model, **options)
