"""Which types of tensors are plain, and tensors without data among them while a step is predicted.

Hooks and the codec take a tensor of a type they do not know for one whose memory means something
else, and keep it. A type that Python alone knows of means nothing else. A fake tensor of torch
stands for a plain one: within fakes_are_plain() it is packed like one, into a buffer of the size
that it would have, and no kernel is launched. Not thread-safe: predictions are made one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.parameter import UninitializedBuffer

from vramx.patch.of_classes import found_of

# A list: torch 2.6 compiles no look for a class in a set.
PLAIN: list[type] = [torch.Tensor, torch.nn.Parameter]


def _is_labelled(cls: Any) -> bool:
    """Tell whether tensors of a class are plain ones to all of torch below Python.

    Such a class tells where data is from, or what it is of: an image, a batch with its history.

    Example:
        >>> is_labelled(type("Image", (torch.Tensor,), {}))
        True
    """
    if issubclass(cls, (torch.nn.Parameter, UninitializedBuffer)):
        return False
    return bool(cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__)


is_labelled = found_of(_is_labelled)


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
