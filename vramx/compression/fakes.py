"""Which types of tensors are plain, and tensors without data among them while a step is predicted.

Hooks and the codec take a tensor of a type they do not know for one whose memory means something
else, and keep it. A fake tensor of torch stands for a plain one: within fakes_are_plain() it is
packed like one, into a buffer of the size that it would have, and no kernel is launched. Not
thread-safe: predictions are made one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch

# A list: torch 2.6 compiles no look for a class in a set.
PLAIN: list[type] = [torch.Tensor, torch.nn.Parameter]


class NoLaunches:
    """Stands for the kernels' launchers: results are what they are given to write."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        return answering(None)


def answering(answer: object) -> Callable[..., object]:
    """Return a function of one answer; a mock would keep the tensors that it is asked about."""
    return lambda *_, **__: answer


def _launch(device: torch.device) -> NoLaunches | None:
    """Return what launches kernels; None on the host, whose tensors have data: blocks are tried."""
    return None if device.type == "cpu" else NoLaunches()


def _drawn_from(state: torch.Tensor) -> Callable[[torch.device], torch.Tensor | None]:
    """Return what gives the state of noise: a kernel draws within itself, the host in tensors."""
    return lambda device: state if device.type == "cpu" else None


@contextlib.contextmanager
def fakes_are_plain() -> Iterator[None]:
    """Have torch's fake tensors packed as the tensors that they stand for."""
    from torch._subclasses.fake_tensor import FakeTensor

    from vramx.compression import lifetime
    from vramx.compression.codec import codec, random
    from vramx.kernels import start

    PLAIN.append(FakeTensor)
    try:
        with (
            mock.patch.object(start, "_launches", False),
            mock.patch.object(codec, "_launch", _launch),
            mock.patch.object(random, "state", _drawn_from(torch.zeros(2, dtype=torch.int64))),
            mock.patch.object(lifetime, "_has_streams", answering(False)),
            mock.patch.object(lifetime, "_raw_stream", answering(0)),
        ):
            yield
    finally:
        PLAIN.remove(FakeTensor)
