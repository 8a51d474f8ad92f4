"""The codec on a GPU: a CPU's values, no wait, no memory but the result's, graphs, streams.

The kernels themselves, on groups that are not finite too, are compared with the reference in
test_kernels_gpu.py; here it is what pack() and unpack() promise to their callers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from codec_samples import bfloat16_towards, step_of

from gpu import tools
from gpu.tools import MIB
from vramx.compression.codec import random
from vramx.compression.codec.codec import layout_of, pack, unpack
from vramx.compression.config import MASK_FORMAT, ROUNDINGS, Format

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

FORMATS = [
    Format(bits, size, symmetric, rounding)
    for bits, size in [(8, 128), (4, 64)]
    for symmetric in (True, False)
    for rounding in ROUNDINGS
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUMEL = 1_000_001


def packed_on(device: str, x: torch.Tensor, format: Format, seed: int = 3) -> torch.Tensor:
    random.manual_seed(seed, rank=0)
    return unpack(pack(x.to(device), format)).cpu()


def quotients(x: torch.Tensor, format: Format, size: torch.Tensor) -> torch.Tensor:
    """Return x / s, or (x - minimum) / s, as they are before a product is rounded.

    The factors are float32's x - minimum and 1 / s, which a CPU and a GPU both make, to the bit;
    float64 has room for their product.
    """
    groups = x.float().view(-1, format.group_size)
    if not format.symmetric:
        low = bfloat16_towards(groups.double().amin(1, keepdim=True), -math.inf)
        groups = groups - low.float()
    return groups.view(-1).double() * (1 / size.float()).double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_a_gpu_decodes_what_a_cpu_decodes(format: Format, dtype: torch.dtype) -> None:
    # The same seed gives the same noise. A GPU may fuse the product and the addition after it: then
    # the product is not rounded, by at most 2**-17, half a unit of [128, 256). To the nearest that
    # matters where the product is that close to halfway between two codes, where many of bfloat16
    # lie; with noise, where the product is that close to a middle between two 256ths and the noise
    # takes one of them to the next code, for no more than one element in 2**16. Such elements
    # differ by one step.
    # Decoding may round once too: by a unit of the type, and 2**-15 of a step.
    x = torch.randn(NUMEL).to(dtype)
    on_gpu, on_cpu = (packed_on(device, x, format).double() for device in ("cuda", "cpu"))
    missing = -NUMEL % format.group_size
    whole = torch.cat([x, x[-1:].expand(missing)])
    size = step_of(whole, format).size
    place = quotients(whole, format, size)[:NUMEL]
    size = size[:NUMEL]
    apart = (on_gpu - on_cpu).abs()
    unit = torch.finfo(dtype).eps * (x.double().abs() + 2 * size) + 2.0**-15 * size
    differs = apart > unit
    assert (apart <= size + unit).all()
    if format.rounding == "nearest":
        assert ((place - place.floor() - 0.5).abs()[differs] <= 2.0**-17).all()
    else:
        expected = NUMEL * 2.0**-16
        assert differs.sum() <= expected + 5 * math.sqrt(expected)
        assert not torch.equal(on_gpu, x.double())


@pytest.mark.parametrize("format", [Format(), MASK_FORMAT], ids=repr)
def test_an_empty_tensor_comes_back_empty(format: Format) -> None:
    dtype = torch.bool if format.bits == 1 else torch.bfloat16
    assert unpack(pack(torch.empty(0, dtype=dtype, device="cuda"), format)).shape == (0,)


@pytest.mark.parametrize("format", [*FORMATS, Format(6, 64), MASK_FORMAT], ids=repr)
def test_nothing_waits_for_the_device(format: Format) -> None:
    x = torch.randn(1 << 20, device="cuda")
    x = x > 0 if format.bits == 1 else x
    unpack(pack(x, format))  # compiles, and sets up the noise
    with tools.no_waiting():
        unpack(pack(x, format))
        random.advance_epoch(x.device)
        random.manual_seed(1)


@pytest.mark.parametrize("format", [*FORMATS, MASK_FORMAT], ids=repr)
def test_no_memory_is_taken_but_the_result(format: Format) -> None:
    numel = 16 * MIB
    x = torch.randn(numel, device="cuda").to(torch.bfloat16)
    x = x > 0 if format.bits == 1 else x
    unpack(pack(x, format))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    packed = pack(x, format)
    taken = torch.cuda.max_memory_allocated() - before
    assert packed.nbytes == layout_of(numel, format).buffer_bytes
    assert packed.nbytes <= taken <= packed.nbytes + 2 * MIB  # the allocator's rounding
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    decoded = unpack(packed)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= decoded.numel() * decoded.element_size() + 2 * MIB


def captured(x: torch.Tensor, advance: bool) -> tuple[Any, torch.Tensor]:
    """Capture a pack and an unpack and return the graph and its output.

    A replay reads x where it was: the caller keeps it.
    """

    def work() -> torch.Tensor:
        if advance:
            random.advance_epoch(x.device)
        return unpack(pack(x, Format()))

    return tools.captured(work)


def replayed(graph: Any, out: torch.Tensor) -> torch.Tensor:
    out.fill_(float("nan"))
    graph.replay()
    return out.clone()


def test_every_replay_draws_new_noise_where_the_graph_advances_the_epoch() -> None:
    x = torch.randn(1 << 16, device="cuda")
    graph, out = captured(x, advance=True)
    first, second = replayed(graph, out), replayed(graph, out)
    assert not torch.equal(first, second)
    assert (first - x).norm() / x.norm() < 0.02


def test_a_replay_repeats_its_noise_where_the_epoch_stays() -> None:
    x = torch.randn(1 << 16, device="cuda")
    graph, out = captured(x, advance=False)
    assert torch.equal(replayed(graph, out), replayed(graph, out))


def test_a_seed_takes_effect_in_a_captured_graph() -> None:
    x = torch.randn(1 << 16, device="cuda")
    graph, out = captured(x, advance=True)
    random.manual_seed(5)
    first = replayed(graph, out)
    random.manual_seed(5)
    again = replayed(graph, out)
    random.manual_seed(6)
    assert torch.equal(first, again)
    assert not torch.equal(first, replayed(graph, out))


@pytest.mark.two_gpus
def test_a_second_gpu_is_served_while_the_first_is_current() -> None:
    x = torch.randn(NUMEL, device="cuda:1")
    with torch.cuda.device(0):
        packed = pack(x, Format())
        decoded = unpack(packed)
    assert (packed.buffer.device, decoded.device) == (x.device, x.device)
    assert (decoded - x).norm() / x.norm() < 0.02
