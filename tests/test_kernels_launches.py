"""A launch that differs from another in what Triton compiles for is never made with its kernel.

Launchers look up what they launch by sizes and types, and give what was compiled addresses. Here a
stand-in takes the place of each kernel, so no GPU is needed: a launch that is new to it is Triton's
own call, one that is not is a call of what was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import channel_launches
import pytest
import torch
from channel_launches import BF16, FP32, LAYOUT, NOISE, rows, vector
from torch import Tensor

from vramx.kernels import (
    channel_norm_launch,
    channel_norm_tables_launch,
    elementwise_launch,
    launch,
    norm_backward_launch,
    norm_launch,
    rotary_launch,
)
from vramx.kernels import start as module
from vramx.kernels.elementwise_launch import Noise

pytest.importorskip("triton")

KERNELS = {
    "norm_forward": ("norm_forward_kernel", "norm_output_kernel"),
    "norm_backward": ("norm_backward_kernel",),
    "norm_sums": ("column_sums_kernel",),
    "rotary": ("rotary_kernel",),
    "glu": ("glu_kernel", "glu_backward_kernel"),
    "activation": ("activation_kernel", "relu_kernel"),
    "dropout": ("dropout_kernel",),
    "channel_norm": ("channel_norm_kernel", "channel_norm_output_kernel"),
    "channel_norm_backward": ("channel_norm_input_kernel", "channel_norm_sums_kernel"),
    "channel_norm_tables": ("channel_norm_statistics_kernel", "channel_norm_factors_kernel"),
}
CACHES = (
    launch.ready_for, norm_launch._forward_launch, norm_launch._output_launch,
    norm_backward_launch._of_rows, norm_backward_launch._of_sums, rotary_launch._of_shape,
    rotary_launch.rotary_plan, elementwise_launch._tile_plan, elementwise_launch.relu_plan,
    elementwise_launch.dropout_plan, channel_norm_launch._forward_launch,
    channel_norm_launch._launch, channel_norm_launch._plan, channel_norm_launch.plan_of,
    channel_norm_launch.sums_plan, channel_norm_launch._sums_launch,
    channel_norm_launch._sums_of_shape, channel_norm_tables_launch._statistics_plan,
    channel_norm_tables_launch._factors_plan,
)  # fmt: skip
Launches = dict[str, Any]


@pytest.fixture(name="launches")
def _launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Count Triton's own calls and those of what was compiled; note what the latter are given."""
    counts: Launches = {"own": 0, "compiled": 0, "given": []}

    class Kernel:
        pre_run_hooks: tuple[Any, ...] = ()

        def __init__(self, kernel: Any) -> None:
            self.arg_names = kernel.arg_names

        def __getitem__(self, _grid: Any) -> Callable[..., Any]:
            return self.call

        def call(self, *_args: Any, **_constants: Any) -> Any:
            counts["own"] += 1
            return SimpleNamespace(run=self.run, function=1, packed_metadata=2)

        def run(self, *args: Any) -> None:
            counts["compiled"] += 1
            counts["given"].append(args[9:])

    for file, names in KERNELS.items():
        kernels = __import__(f"vramx.kernels.{file}", fromlist=names)
        for name in names:
            monkeypatch.setattr(kernels, name, Kernel(getattr(kernels, name)))
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_is_known_version", lambda: True)
    monkeypatch.setattr(module, "_streams", lambda: lambda _index: 0)
    for cache in CACHES:
        cache.cache_clear()
    yield counts
    for cache in CACHES:
        cache.cache_clear()


PACKED = torch.zeros(2048, dtype=torch.uint8), torch.zeros(8), 128


def norm(
    x: Tensor | None = None, y: torch.dtype = BF16, affine: tuple[Any, Any] = (BF16, None),
    adds: bool = False, kept: Any = PACKED, centred: bool = False, noise: Tensor | None = NOISE,
) -> None:  # fmt: skip
    x = rows() if x is None else x
    total = torch.empty_like(x) if adds else None
    norm_launch.norm_forward(
        (x, x.clone() if adds else None),
        norm_launch.Affine(*map(vector, affine)),
        (x.to(y), total),
        None if kept is None else norm_launch.Kept(*kept),
        (1e-6, centred, norm_launch.Noise(noise, 5)),
    )


def output(
    kept: Any = PACKED, affine: tuple[Any, Any] = (BF16, None), y: Tensor | None = None
) -> None:
    vectors = norm_launch.Affine(*map(vector, affine))
    norm_launch.norm_output(norm_launch.Kept(*kept), vectors, rows() if y is None else y)


def backward(
    dy: Tensor | None = None, adds: bool = False, weight: torch.dtype | None = BF16,
    wanted: tuple[Any, Any] = (BF16, None), dx: torch.dtype = BF16, kept: Any = PACKED,
) -> None:  # fmt: skip
    dy = rows() if dy is None else dy
    norm_backward_launch.norm_backward(
        (dy, rows() if adds else None),
        vector(weight),
        norm_launch.Kept(*kept),
        dy.to(dx),
        (norm_backward_launch.Shares(*map(vector, wanted)), False),
    )


def turn(
    x: Tensor | None = None, y: torch.dtype = BF16, cos: Tensor | None = None, back: bool = False
) -> None:
    x = torch.zeros(2, 4, 32, 16, dtype=BF16) if x is None else x
    cos = torch.zeros(2, 1, 32, 16, dtype=BF16) if cos is None else cos
    rotary_launch.rotate(x, cos, cos.clone(), torch.empty_like(x, dtype=y), transposed=back)


def glu(
    dtype: torch.dtype = BF16, packs: bool = True, kind: str = "silu", noise: Any = NOISE
) -> None:
    gate, up = rows(dtype), rows(dtype)
    buffers = (PACKED[0], PACKED[0].clone()) if packs else (gate, up)
    drawn = None if noise is None else Noise(noise, (3, 4))
    layout = LAYOUT if packs else None
    elementwise_launch.glu((gate, up), gate, buffers, layout, kind, drawn)


def drop(dtype: torch.dtype = BF16, added: torch.dtype | None = BF16, kept: int = 9) -> None:
    x = rows(dtype)
    residual = None if added is None else rows(added)
    elementwise_launch.dropout(x, residual, torch.empty_like(x), NOISE, kept)


WIDE_HEADS = torch.zeros(2, 32, 4, 16, dtype=BF16).transpose(1, 2)
EXACT = {"kept": (rows(), PACKED[1], 0)}
# What may differ of each launch.
OTHERS: dict[Callable[..., None], list[dict[str, Any]]] = {
    norm: [
        {"x": rows(FP32), "kept": None}, {"y": FP32}, {"affine": (None, None)},
        {"affine": (FP32, None)}, {"affine": (BF16, BF16)}, {"adds": True}, {"kept": None}, EXACT,
        {"centred": True}, {"noise": None},
    ],
    output: [{"y": rows(FP32)}, {"kept": (rows(), None, 0)}, {"affine": (BF16, FP32)}],
    backward: [
        {"dy": rows(FP32)}, {"adds": True}, {"weight": None}, {"wanted": (FP32, None)},
        {"wanted": (BF16, BF16)}, {"dx": FP32}, EXACT,
    ],
    turn: [
        {"x": WIDE_HEADS.contiguous().float()}, {"y": FP32}, {"back": True},
        {"x": torch.zeros(2, 4, 32, 24, dtype=BF16)[..., :16]},  # of other strides
        {"x": torch.zeros(2, 8, 32, 16, dtype=BF16)}, {"cos": torch.zeros(2, 1, 32, 16)},
    ],
    glu: [{"dtype": FP32}, {"packs": False, "noise": None}, {"kind": "gelu"}, {"noise": None}],
    drop: [{"dtype": FP32, "added": FP32}, {"added": None}, {"added": FP32}],
    **channel_launches.OTHERS,
}  # fmt: skip
OF_EXACT = [
    (norm, {"kept": None}),
    (output, {"kept": (rows(FP32), None, 0)}),  # of another type
    (backward, {"kept": (rows(FP32), PACKED[1], 0)}),
]
CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    *((call, change, {}) for call, changes in OTHERS.items() for change in changes),
    *((call, change, EXACT) for call, change in OF_EXACT),
]
IDS = [f"{call.__name__} with another {' and '.join(change)}" for call, change, _ in CASES]


@pytest.mark.parametrize(("call", "change", "of"), CASES, ids=IDS)
def test_another_kind_of_launch_is_tritons_own_call(
    call: Callable[..., None], change: dict[str, Any], of: dict[str, Any], launches: Launches
) -> None:
    call(**of)
    first = launches["own"]
    call(**of)
    assert launches["own"] == launches["compiled"] == first  # the same again was compiled
    call(**change)
    assert launches["own"] > first
    own, compiled = launches["own"], launches["compiled"]
    call(**change)
    call(**of)
    assert launches["own"] == own
    assert launches["compiled"] > compiled


@pytest.mark.parametrize(
    ("call", "many"), [(norm, {"x": rows(count=24)}), (output, {"y": rows(count=24)})]
)
def test_another_number_of_rows_is_launched_with_what_was_compiled(
    call: Callable[..., None], many: dict[str, Any], launches: Launches
) -> None:
    call()
    for _ in range(2):
        call(**many)
    # The first of a number asks for what was compiled, as Triton's own call would.
    assert (launches["own"], launches["compiled"]) == (1, 2)


def test_turned_heads_are_launched_with_their_own_strides(launches: Launches) -> None:
    heads = torch.zeros(2, 4, 32, 16, dtype=BF16)
    for x in (heads, WIDE_HEADS, heads, WIDE_HEADS):
        turn(x)
    assert launches["own"] == 1  # the strides are multiples of 16 all
    for x, given in zip((WIDE_HEADS, heads, WIDE_HEADS), launches["given"], strict=True):
        # After addresses: heads, tokens, and strides of x, of the result, and of cosines.
        assert given[4:15] == (4, 32, *x.stride()[:3], *x.stride()[:3], 512, 0, 16)
    turn(cos=torch.zeros(2, 4, 32, 16, dtype=BF16))  # of each head: the same, with one more stride
    assert launches["own"] == 1
    assert launches["given"][-1][12:15] == (2048, 512, 16)
