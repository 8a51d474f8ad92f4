"""The memory of a tensor whose place a copy takes lives until the stream that reads it is done.

Streams are stand-ins here; tests/gpu/test_compress_gpu.py has real ones.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from compress_tools import check_that_nothing_is_left, input_of

import vramx
from vramx.compression import lifetime
from vramx.compression.codec import codec
from vramx.compression.codec.codec import pack, unpack
from vramx.compression.codec.rows import scaled
from vramx.compression.config import MASK_FORMAT, Format
from vramx.compression.hooks import compress
from vramx.nn.linear import linears
from vramx.nn.norm import rms_norm
from vramx.nn.recomputed import recomputed

STREAM = "the stream that is current"
WEIGHT = torch.nn.Parameter(torch.ones(64, 64))


@pytest.fixture(name="recorded")
def _recorded(monkeypatch: Any) -> set[int]:
    """Give the addresses of the memory that the current stream was recorded on."""
    found: set[int] = set()

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        assert stream == STREAM
        found.add(tensor.untyped_storage().data_ptr())

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(lifetime, "_has_streams", lambda _tensor: True)
    monkeypatch.setattr(lifetime, "_current_stream", lambda _device: STREAM)
    return found


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def hooked(
    function: Callable[[torch.Tensor], Any], *level: str, min_bytes: int = 64
) -> Callable[[torch.Tensor], Any]:
    def call(x: torch.Tensor) -> None:
        with compress(*level, min_bytes=min_bytes):
            function(x)

    return call


FUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "norm": rms_norm,
    "linears": lambda x: linears(x, [WEIGHT, WEIGHT]),
    "silu": vramx.nn.functional.silu,
    "relu": vramx.nn.functional.relu,
    "dropout": lambda x: vramx.nn.functional.dropout(x, 0.5),
}
LETTING_GO: dict[str, Callable[[torch.Tensor], Any]] = {
    "a factor": hooked(lambda x: x * WEIGHT),
    "a view": hooked(lambda x: functional.linear(x.view(8, 8, 64), WEIGHT)),
    "a view with holes": hooked(lambda x: x[:, ::2] * WEIGHT[:, :32]),
    "signs": hooked(lambda x: functional.relu(x, inplace=True)),
    "a part of what is kept": hooked(lambda x: x[:4].abs()),
    "a mask": hooked(lambda x: WEIGHT.masked_fill(x, 0.0)),
    **{
        f"a checkpoint's input, {level}": lambda x, level=level: vramx.checkpoint(
            lambda y: y.cumsum(-1), x, level=vramx.Compression(level=level, min_bytes=0)
        )
        for level in ("int8", "int4")
    },
    # Called directly, and through torch.library where a context may watch.
    **{f"{name}, fused": hooked(FUSED[name], "keep", min_bytes=1 << 30) for name in FUSED},
    **{f"{name}, watched": hooked(FUSED[name], "int8", min_bytes=1 << 30) for name in FUSED},
}


@pytest.mark.parametrize("name", LETTING_GO)
def test_what_is_let_go_of_is_recorded(name: str, recorded: set[int]) -> None:
    x = input_of(64, 64)
    x = x > 0 if name == "a mask" else x
    LETTING_GO[name](x)
    assert address(x) in recorded


def test_a_second_operation_on_what_is_packed_records_it_as_well(recorded: set[int]) -> None:
    x = input_of(64, 64)
    with compress(min_bytes=64):
        first = x * WEIGHT
        recorded.clear()
        second = x * WEIGHT
    assert address(x) in recorded
    del first, second


def test_what_is_kept_is_not_recorded(recorded: set[int]) -> None:
    x = input_of(64, 64)
    with compress(min_bytes=64):
        x.exp().div(x)
    assert recorded == set()


@pytest.mark.parametrize("form", [Format(), MASK_FORMAT], ids=["numbers", "masks"])
def test_a_packed_buffer_is_recorded_where_another_stream_reads_it(
    form: Format, recorded: set[int], monkeypatch: Any
) -> None:
    packed = pack(torch.ones(256) > 0 if form is MASK_FORMAT else torch.ones(256), form)
    unpack(packed)
    assert recorded == set()  # it is the memory of the stream that packed it
    monkeypatch.setattr(codec, "current_stream", lambda _tensor: 1)
    unpack(packed)
    assert recorded == {address(packed.buffer)}


def test_scales_of_rows_are_recorded_where_another_stream_reads_them(
    recorded: set[int], monkeypatch: Any
) -> None:
    x = torch.ones(64, 24)
    mapping = scaled(x, 24)
    packed = pack(x.view(-1), Format(), None, mapping)
    monkeypatch.setattr(codec, "current_stream", lambda _tensor: 1)
    unpack(packed)
    assert recorded == {address(packed.buffer), address(mapping.function.rstd)}


def test_what_a_fused_operation_shares_is_recorded_before_backward_reads_it(
    recorded: set[int],
) -> None:
    """A norm may have run on another stream than the Linears that read its pack in backward."""
    normed = rms_norm(input_of(64, 64))
    recorded.clear()
    y = linears(normed, [WEIGHT, WEIGHT])[0]
    assert address(normed.kept.buffer) in recorded
    recorded.clear()
    y.sum().backward()
    assert recorded == set()  # backward is on the stream of forward


def test_what_runs_again_records_the_pack_that_it_reads(recorded: set[int]) -> None:
    normed = rms_norm(input_of(64, 64))
    y = recomputed(lambda source, _: source.sin(), normed, None, None)  # type: ignore[union-attr]
    recorded.clear()
    y.sum().backward()
    assert address(normed.kept.buffer) in recorded


class _Remembering(torch.nn.Module):
    """Holds what it returned last, as a module with a weight norm holds a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.layers(x)
        return self.last


def test_a_module_that_holds_a_graph_of_its_own_goes_with_its_last_reference() -> None:
    module = vramx.compressed_activations(_Remembering(), min_bytes=0)
    module(input_of(32, 64))
    assert vramx.compression_stats(module).packed.tensors
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    check_that_nothing_is_left()
