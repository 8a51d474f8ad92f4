"""vramx.predict follows programs of many kinds: sparse, fused, compiled, on streams, recomputed."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch
from predict_tools import training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vramx
from vramx.errors import UntraceableError

LAYER = nn.Linear(8, 8)
ATTENTION = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
BAG = nn.EmbeddingBag(100, 16, sparse=True)
SPARSE = torch.optim.SparseAdam(BAG.parameters())
FUSED = torch.optim.Adam(LAYER.parameters(), fused=True, lr=torch.tensor(0.1))
COMPILED = torch.compile(LAYER)


def _inputs(*shape: int) -> Tensor:
    return torch.zeros(shape or (4, 8), device="cuda", requires_grad=True)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.exp()


def sparse() -> None:
    BAG(torch.zeros(4, 3, dtype=torch.int64, device="cuda")).sum().backward()
    SPARSE.step()
    SPARSE.zero_grad()


def fused() -> None:
    LAYER(_inputs()).sum().backward()
    nn.utils.clip_grad_norm_(LAYER.parameters(), 1.0)
    FUSED.step()


def compiled() -> None:
    COMPILED(_inputs()).sum().backward()


def twice_differentiated() -> None:
    x = _inputs()
    (gradient,) = torch.autograd.grad(LAYER(x).pow(2).sum(), x, create_graph=True)
    gradient.sum().backward()


def own_function() -> None:
    Exponential.apply(LAYER(_inputs())).sum().backward()


def attention_module() -> None:
    x = _inputs(2, 16, 32)
    ATTENTION(x, x, x, need_weights=False)[0].sum().backward()


def streams_and_events() -> None:
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        LAYER(torch.zeros(4, 8).pin_memory().cuda(non_blocking=True)).sum().backward()
    torch.cuda.synchronize()


def compressed_by_hand() -> None:
    with vramx.compress("int8", min_bytes=0):
        y = LAYER(LAYER(_inputs()).relu())
    y.sum().backward()


def checkpointed_by_hand() -> None:
    vramx.checkpoint(LAYER, _inputs(), level="int8").sum().backward()


def reentrant() -> None:
    checkpoint(LAYER, _inputs(), use_reentrant=True).sum().backward()


OTHERS = (
    *(sparse, fused, compiled, twice_differentiated, own_function, attention_module),
    *(streams_and_events, compressed_by_hand, checkpointed_by_hand, reentrant),
)


@pytest.mark.parametrize("step", OTHERS, ids=lambda step: step.__name__)
def test_programs_of_other_kinds_are_followed(step: Any) -> None:
    try:
        row = vramx.predict(step, policies="live").row()
    except UntraceableError as error:
        if torch.__version__ >= "2.9" or "no fake kernel" not in str(error):
            raise
        pytest.skip(f"this torch cannot without data: {error}")
    assert row.peak_bytes["live"] > row.before_bytes > 0
    assert all(p.grad is None for p in (*LAYER.parameters(), *BAG.parameters()))


def test_types_of_the_time_before_devices_are_followed() -> None:
    seen = deque[Any]()

    def step() -> None:
        made = LAYER(_inputs().cpu().type(LAYER.weight.type()))
        others = made.type(torch.cuda.HalfTensor), made.type("torch.LongTensor"), made.type(None)
        seen.append([(x.dtype, x.device.type) for x in (made, *others[:2])] + [others[2]])
        made.sum().backward()

    vramx.predict(step, steps=1)
    cuda, kinds = "cuda", (torch.float32, torch.float16)
    expected = [*((kind, cuda) for kind in kinds), (torch.int64, "cpu"), "torch.cuda.FloatTensor"]
    assert seen[0] == expected


def test_hooks_of_modules_are_copied_with_what_they_reach() -> None:
    layer, outputs, v = nn.Linear(8, 8), list[Tensor](), torch.ones(8)
    layer.register_forward_hook(lambda _, __, y: outputs.append(y + v))

    def step() -> None:
        layer(torch.zeros(4, 8, device="cuda")).sum().backward()

    assert vramx.predict(step).peak_bytes() > 0
    assert outputs == []


class CopiesItself(nn.Module):
    """Has a part more in a copy."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        made = CopiesItself(copy.deepcopy(self.layer, memo))
        made.cache = nn.Identity()
        return made


def test_a_model_with_other_parts_in_its_copy_is_followed_and_its_hooks_with_it() -> None:
    outputs: list[Tensor] = []

    def peak(first: nn.Module) -> int:
        model = nn.Sequential(first, nn.Linear(8, 8))
        for layer in model:
            layer.register_forward_hook(lambda _, __, y: outputs.append(y))
        step = training(model, torch.zeros(4, 8))
        return vramx.predict(step, policies="live").peak_bytes()

    assert peak(CopiesItself(nn.Linear(8, 8))) == peak(nn.Linear(8, 8))
    assert outputs == []
