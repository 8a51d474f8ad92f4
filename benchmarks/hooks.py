"""What hooks cost the host for what an operation saves, by operation: packing, and unpacking.

An operation runs many times, exactly and with hooks in turn, and its backward likewise; the
difference is what hooks take, the function mode that sees the call included. On a GPU the kernels
are launched, of tensors so small that the device is never waited for. Elsewhere they are left out,
and what is measured is the work in Python alone: the figures of one machine are to be compared, in
one run, with those of another commit. Takes a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import Measurement, Options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DESCRIPTION = "host time of hooks for what an operation saves, by operation"

CALLS = 50  # in a row, between two looks at the clock
MIN_BYTES = 4096
TOKENS = (16, 64, 64)
PICTURES = (8, 8, 16, 16)


class Subject(NamedTuple):
    """An operation, and the size of the tensor that it is given."""

    size: tuple[int, ...]
    call: Callable[[Tensor], Tensor]


def cases(options: Options) -> list[str]:
    names = [
        *("linear", "conv2d", "layer_norm", "batch_norm", "gelu", "relu", "tanh", "pow", "dropout"),
        *("mul", "attention"),
    ]
    return names[:1] if options.quick else names


def measure(case: str, options: Options) -> list[Measurement]:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    subject = subjects(device)[case]
    repeats = 5 if options.quick else 51
    packing: list[float] = []
    unpacking: list[float] = []
    with kernels_left_out() if device.type == "cpu" else nullcontext():
        packed = tensors_packed(subject, device)
        for repeat in range(repeats + 3):
            exact, hooked = (times_us(subject, device, packs) for packs in (False, True))
            if repeat >= 3:
                packing.append(hooked[0] - exact[0])
                unpacking.append(hooked[1] - exact[1])
    return [
        Measurement("host_pack_us", "us", packing),
        Measurement("host_unpack_us", "us", unpacking),
        Measurement("packed_tensors", "1", [packed]),
    ]


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """Have no kernel launched, and no other way taken for want of a device that has them."""
    from unittest import mock

    from vramx.compression import fakes
    from vramx.compression.codec import codec

    with mock.patch.object(codec, "_launch", fakes.answering(fakes.NoLaunches())):
        yield


def times_us(subject: Subject, device: torch.device, packs: bool) -> tuple[float, float]:
    """Return the microseconds of the host for a call, and for its backward."""
    import torch

    import vramx

    inputs = [fresh(subject.size, device) for _ in range(CALLS)]
    wait(device)
    with vramx.compress(min_bytes=MIN_BYTES) if packs else nullcontext():
        start_s = time.perf_counter()
        results = [subject.call(x) for x in inputs]
        called_s = time.perf_counter() - start_s
    gradients = [torch.zeros_like(y) for y in results]
    wait(device)
    start_s = time.perf_counter()
    torch.autograd.backward(results, gradients)
    returned_s = time.perf_counter() - start_s
    return 1e6 * called_s / CALLS, 1e6 * returned_s / CALLS


def tensors_packed(subject: Subject, device: torch.device) -> float:
    """Return how many tensors are packed for a call."""
    import vramx

    with vramx.compress(min_bytes=MIN_BYTES) as stats:
        subject.call(fresh(subject.size, device))
    return float(stats.packed.tensors)


def fresh(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a tensor of its own that an operation has made."""
    import torch

    x = torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True)
    return 0.5 * x


def wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def subjects(device: torch.device) -> dict[str, Subject]:
    """Return each case's operation; weights are made here, once."""
    import torch
    from torch import nn
    from torch.nn import functional

    with device:
        linear, norm = nn.Linear(64, 64).bfloat16(), nn.LayerNorm(64)
        conv, batch = nn.Conv2d(8, 8, 1).bfloat16(), nn.BatchNorm2d(8)

    def attention(x: Tensor) -> Tensor:
        query, key, value = x.unbind(0)
        return functional.scaled_dot_product_attention(query, key, value)

    return {
        "linear": Subject(TOKENS, linear),
        "conv2d": Subject(PICTURES, conv),
        "layer_norm": Subject(TOKENS, lambda x: norm(x.float())),
        "batch_norm": Subject(PICTURES, lambda x: batch(x.float())),
        "gelu": Subject(TOKENS, functional.gelu),
        "relu": Subject(PICTURES, functional.relu),
        "tanh": Subject(TOKENS, torch.tanh),
        "pow": Subject(TOKENS, lambda x: x**2),
        "dropout": Subject(TOKENS, lambda x: functional.dropout(x, 0.1)),
        "mul": Subject(TOKENS, lambda x: x * (x + 1)),
        "attention": Subject((3, 2, 4, 64, 16), attention),
    }
