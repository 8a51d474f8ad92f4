"""vramx.predict: what cannot be known of a step, and bad input, is one error that names it."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from plan_tools import Stack, rows
from predict_tools import peak
from torch import Tensor, nn

import vramx
from vramx.errors import InvalidValueError, UntraceableError


@torch.library.custom_op("vramx_tests::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return x.clone()


def compares_a_float(x: Tensor) -> None:
    if x.sum() < 1:
        x.sum()


def reads_a_size(x: Tensor) -> Tensor:
    return x[: int(x.argmax().item())]


def reads_sizes(x: Tensor) -> Tensor:
    return x.view(*(4 * 4 // (x[0, :2].long().cpu().numpy() + 1)))


class Scripted(torch.jit.ScriptModule):
    """A module whose forward is Python, and calls what is compiled."""

    @torch.jit.script_method
    def part(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def counts(x: Tensor) -> Tensor:
    return torch.bincount(x.long())


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (reads_a_size, r"reads a value of int64 .*\(test_predict_refused.py:\d+\)"),
        (
            compares_a_float,
            r"reads a value of bool .*, compare item\(\) of a float",
        ),
        (
            lambda x: pickle.dumps(nn.Parameter(x)),
            "pickled.* has no data; leave it out of",
        ),
        (lambda x: x.numpy(), r"no numpy\(\); call detach\(\).cpu\(\) before it"),
        (reads_sizes, r"invalid.*assumed: arrays .* by numpy\(\) \(test_predict_refused.py:\d+\)"),
        (nn.Sequential(Scripted()).forward, "what torch.jit has compiled"),
        (counts, "aten.bincount.*cannot run without data"),
        (no_fake, "vramx_tests::no_fake"),
        (lambda x: x @ x[:3], "the step fails without data"),
    ],
)
def test_what_needs_data_is_one_error_that_names_it(step: Any, said: str) -> None:
    with pytest.raises(UntraceableError, match=said):
        vramx.predict(step, torch.zeros(4, 4))


def test_what_a_step_makes_on_the_host_is_told_of() -> None:
    layer = nn.Linear(64, 64)
    with pytest.raises(UntraceableError, match="make it before the step, or on the device of"):
        peak(lambda: layer(torch.ones(4, 64)))


@pytest.mark.parametrize("count", [1, 4])
def test_models_in_other_threads_are_refused_in_words(count: int) -> None:
    model, x = Stack(1), rows(4)

    def step() -> None:
        with ThreadPoolExecutor(count) as pool:
            sum(y.sum() for y in pool.map(model, [x] * count)).backward()

    with pytest.raises(UntraceableError, match="runs a model in another thread"):
        vramx.predict(step)


def generates() -> Any:
    yield nn.Linear(2, 2)


async def waits() -> None: ...


MODEL = nn.Linear(2, 2), torch.ones(2)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((3,), {}, "step 3 is not accepted"),
        ((generates,), {}, "gives a generator, of which nothing has run"),
        ((waits,), {}, "gives a coroutine, of which nothing has run"),
        ((nn.Linear(2, 2),), {}, "followed by one sample"),
        ((nn.Linear(2, 2), 3), {}, "sample 3 is not accepted"),
        ((reads_a_size,), {"optimizer": 3}, "optimizer is for a model"),
        (MODEL, {"device": "tpu"}, "device 'tpu' is not accepted"),
        (MODEL, {"levels": ["int5"]}, "level 'int5' is not accepted"),
        (MODEL, {"policies": "best"}, "policy 'best' is not accepted"),
        (MODEL, {"steps": 0}, "steps 0 is not accepted"),
        (MODEL, {"gradients": "gone"}, "gradients 'gone'"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: Any, options: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        vramx.predict(*arguments, **options)
