"""What other libraries' operations save: kept, unless it is known to be harmless; named once.

The libraries are not installed: a Function of the same name and module stands for each.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compress_tools import input_of
from policy_tools import functions_have_names, saved_reason

from vramx import errors
from vramx.compression.hooks import compress
from vramx.compression.policy import third_party
from vramx.errors import VramxWarning


def function_of(module: str, name: str) -> Any:
    """Return a Function that saves its arguments in their order, and whose gradient is known.

    It saves copies, as those do that pad or arrange: only their order tells them.
    """

    def forward(ctx: Any, *args: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*(a.clone() for a in args))
        return torch.stack([a * 1 for a in args]).sum(0)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(grad * saved for saved in ctx.saved_tensors)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), {**methods, "__module__": module})


# From torch 2.14 on a Function is found by a global name.
here = SimpleNamespace()


def exact_positions(function: Any, count: int = 5) -> set[int]:
    """Return the positions of the arguments whose gradient is bit for bit that of torch."""
    torch.manual_seed(0)
    leaves = [torch.randn(16, 64, requires_grad=True) for _ in range(count)]
    here.function = function
    with compress(min_bytes=0):
        y = here.function(*[leaf * 1.0 for leaf in leaves])
    found = torch.autograd.grad(y.sum(), leaves)
    return {i for i in range(count) if torch.equal(found[i], leaves[i])}


FUNCTIONS = [
    ("flash_attn.flash_attn_interface", "FlashAttnFunc", set()),
    ("flash_attn.flash_attn_interface", "FlashAttnVarlenFunc", set()),
    ("flash_attn_interface", "FlashAttnFunc", set()),
    ("flash_attn_interface", "FlashAttnVarlenFunc", set()),
    ("xformers.ops.fmha", "_fMHA", set()),
    ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction", {0, 1}),
    ("liger_kernel.ops.geglu", "LigerGELUMulFunction", {0, 1}),
    ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction", {0}),
    ("liger_kernel.ops.layer_norm", "LigerLayerNormFunction", {0}),
]


def test_every_listed_function_has_a_stand_in() -> None:
    named = {(module.split(".")[0], name) for module, name, _ in FUNCTIONS}
    assert named == {key for key in third_party.PACKED if key[0] != "torchvision"}


@functions_have_names
@pytest.mark.parametrize(("module", "name", "packed"), FUNCTIONS)
def test_of_a_known_function_what_is_harmless_is_packed(
    module: str, name: str, packed: set[int]
) -> None:
    function = function_of(module, name)
    for _ in range(2):  # the second call counts from the start
        assert exact_positions(function.apply) == set(range(5)) - packed


@pytest.mark.parametrize(
    ("module", "name"),
    [("theirs", "FlashAttnFunc"), ("flash_attn.losses", "CrossEntropyLoss"), ("liger", "_fMHA")],
)
def test_the_same_name_elsewhere_is_not_known(module: str, name: str) -> None:
    assert exact_positions(function_of(module, name).apply) == set(range(5))


def operator(library: Any, name: str, arguments: int) -> Any:
    """Register an operator that saves its arguments, and return it."""
    names = ", ".join(f"Tensor a{i}" for i in range(arguments))
    library.define(f"{name}({names}) -> Tensor")
    library.impl(name, lambda *args: torch.stack([a.detach() for a in args]).sum(0), "CPU")
    torch.library.register_autograd(
        f"{library.ns}::{name}",
        lambda ctx, grad: tuple(grad * saved for saved in ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=library,
    )
    return getattr(getattr(torch.ops, library.ns), name)


@pytest.mark.parametrize(
    ("name", "packed"), [("deform_conv2d", {0, 3}), ("roi_align", set()), ("roi_pool", set())]
)
def test_of_torchvision_what_is_harmless_is_packed(name: str, packed: set[int]) -> None:
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        assert exact_positions(operator(library, name, 5)) == set(range(5)) - packed


def test_numbers_of_images_in_a_table_of_boxes_stay_whole() -> None:
    class Crop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, features: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(boxes)
            ctx.count = len(features)
            return features[boxes[:, 0].long()] * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (boxes,) = ctx.saved_tensors
            gradient = grad.new_zeros(ctx.count, grad.shape[1])
            return gradient.index_add_(0, boxes[:, 0].long(), grad), None

    features = torch.randn(8, 16, requires_grad=True)
    corners = torch.rand(64, 4) * 1000
    with compress(min_bytes=0):
        boxes = torch.cat([torch.arange(64)[:, None] % 8, corners], 1)
        y = Crop.apply(features * 1.0, boxes)
    (gradient,) = torch.autograd.grad(y.sum(), features)
    assert torch.equal(gradient, torch.full_like(features, 8.0))


def test_a_function_in_python_that_offers_itself_to_modes_is_kept() -> None:
    """Another library's function may have the name of one of torch's."""

    def mul(x: torch.Tensor) -> torch.Tensor:
        return (x * x.detach()).exp()

    wrapped = torch.overrides.wrap_torch_function(lambda x: (x,))(mul)
    assert set(saved_reason(lambda: wrapped(input_of(8, 64)))) == {"unknown"}


@functions_have_names
def test_an_unknown_operation_is_named_once_with_the_way_out() -> None:
    here.Splat, x = function_of("theirs", "Splat"), input_of(16, 64)
    errors._said.clear()
    with pytest.warns(VramxWarning, match=r'Splat of theirs is not known.*\{"Splat": "int8"\}'):
        assert saved_reason(lambda: here.Splat.apply(x)) == {"unknown": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved_reason(lambda: here.Splat.apply(x))
    assert saved_reason(lambda: here.Splat.apply(x), policy={"Splat": "int8"}) == {"packed": 1}
