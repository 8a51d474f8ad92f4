"""Views to flat ranges and back: every element returns, and no more is kept than is needed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd

import vramx
from vramx.compression.codec.geometry import describe, flat, restore

BASE = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
VIEWS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(1, 2),
    "permuted": BASE.permute(3, 1, 0, 2),
    "channels_last": BASE.contiguous(memory_format=torch.channels_last),
    "slice_of_rows": BASE[1:],
    "slice_of_columns": BASE[..., 1:4],
    "every_second": BASE[..., ::2],
    "one_column": BASE[..., 0],
    "expanded": BASE[:, :1].expand(2, 3, 4, 5),
    "expanded_slice": BASE[:, :1, ::2].expand(2, 3, 2, 5),
    "unfolded": BASE.flatten().unfold(0, 8, 4),
    "scalar": BASE[0, 0, 0, 0],
    "size_one_odd_stride": BASE.as_strided((2, 1, 5), (60, 7, 1)),
    "bool": BASE.transpose(0, 3) > 30,
}
WITH_HOLES = {
    *("slice_of_columns", "every_second", "one_column"),
    *("expanded", "expanded_slice", "size_one_odd_stride"),
}


@pytest.mark.parametrize("name", sorted(VIEWS.keys() - WITH_HOLES))
def test_a_range_without_holes_keeps_its_stride_and_is_not_copied(name: str) -> None:
    view = VIEWS[name]
    geometry = describe(view)
    elements = flat(view, geometry)
    assert elements.data_ptr() == view.data_ptr()
    assert restore(elements, geometry).stride() == view.stride()


@pytest.mark.parametrize("name", VIEWS)
def test_memory_is_made_in_a_shape_only_where_it_has_each_element_once(name: str) -> None:
    geometry = describe(VIEWS[name])
    repeats = name in ("expanded", "expanded_slice", "unfolded")
    assert (geometry.dense is None) == repeats
    if geometry.dense is not None:
        made = torch.empty_strided(*geometry.dense)
        assert made.numel() == made.untyped_storage().nbytes() // 4 == geometry.span
        flat(made, describe(made)).copy_(flat(VIEWS[name], geometry))
        assert torch.equal(made, VIEWS[name].float())


@pytest.mark.parametrize(
    ("name", "elements"),
    [("expanded", 40), ("expanded_slice", 20), ("unfolded", 120), ("every_second", 72)],
)
def test_only_what_is_needed_is_kept(name: str, elements: int) -> None:
    view = VIEWS[name]
    assert flat(view, describe(view)).numel() == elements


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_strided_view_returns(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 4))
    size = data.draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    stride = data.draw(st.lists(st.integers(0, 9), min_size=rank, max_size=rank))
    start = data.draw(st.integers(0, 5))
    storage = torch.arange(200.0)
    view = storage.as_strided(size, stride, start)
    geometry = describe(view)
    elements = flat(view, geometry)
    assert torch.equal(restore(elements, geometry), view)
    # A range never holds an element that the view has not.
    assert set(elements.tolist()) == set(view.flatten().tolist())


class _Notes(torch.autograd.Function):
    """Reads in backward by the strides of forward, as a kernel that is called with them does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.stride = x.stride()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        assert x.stride() == ctx.stride
        return grad * x.cos()


@pytest.mark.parametrize("policy", [None, {"_Notes": "int8"}], ids=["kept", "packed"])
@pytest.mark.parametrize("name", sorted(VIEWS.keys() - {"bool"}))
@pytest.mark.filterwarnings("ignore:.*_Notes of")
def test_a_function_of_others_finds_the_strides_that_it_saved(name: str, policy: Any) -> None:
    x, view = torch.linspace(-1, 1, 120, requires_grad=True), VIEWS[name]

    def viewed() -> torch.Tensor:
        return (x * 1.0).as_strided(view.shape, view.stride(), view.storage_offset())

    with vramx.compress(min_bytes=0, policy=policy):
        y = _Notes.apply(viewed())
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(viewed().sin().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0 if policy is None else 0.03)


@pytest.mark.filterwarnings("ignore:CompiledFunction is not known")
def test_a_compiled_graph_finds_the_strides_that_it_saved() -> None:
    traced: list[Any] = []
    found: list[Any] = []

    def backward(graph: Any, inputs: Any) -> Any:
        traced.extend(x.stride() for x in inputs)
        return lambda *given: found.extend(x.stride() for x in given) or graph(*given)

    compiler = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=backward)
    compiled = torch.compile(lambda x: x.sin().cos(), backend=compiler)
    with vramx.compress(min_bytes=0):
        y = compiled((torch.ones(32, 32, requires_grad=True) * 1.0)[:, :8])
    y.sum().backward()
    assert len(found) > 1
    assert [stride for stride in found if stride[0]] == [stride for stride in traced if stride[0]]


class _Thirds(torch.autograd.Function):
    """Saves three views of one projection, as a compiled graph with an attention does."""

    places: ClassVar[list[list[int]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        thirds = x.detach().sin().chunk(3, dim=-1)
        ctx.save_for_backward(*thirds)
        _Thirds.places.append([third.data_ptr() for third in thirds])
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Thirds.places.append([third.data_ptr() for third in ctx.saved_tensors])
        return grad * torch.cat(ctx.saved_tensors, dim=-1)


@pytest.mark.filterwarnings("ignore:.*_Thirds of")
def test_what_a_function_of_others_saves_of_one_memory_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Thirds, "places", [])
    with vramx.compress(min_bytes=0):
        y = _Thirds.apply(torch.ones(32, 96, requires_grad=True))
    y.backward()
    saved, found = _Thirds.places
    assert saved == found
