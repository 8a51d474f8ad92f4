"""What functions of vramx.nn keep for backward: the bytes of packs, of bits and of keys, no more.

Beside a pack a probe is kept, of one element. Whole blocks are in the tests of
vramx.optimize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from channel_norm_tools import KINDS, affine_of, image, ours
from norm_tools import EXACT, INT4, INT8, held_bytes, norm_of, sample
from torch import Tensor

from vramx.compression.codec.codec import layout_of
from vramx.compression.config import Compression
from vramx.nn.activation import gelu
from vramx.nn.attention import attention_linear, scaled_dot_product_attention
from vramx.nn.convolution import keep_input
from vramx.nn.dropout import dropout, dropout_add
from vramx.nn.feed_forward import TwoLinears, two_linears
from vramx.nn.functional import batch_norm, conv2d, linear, linear_cross_entropy, linears, rotary
from vramx.nn.glu import swiglu
from vramx.nn.low_rank import add_low_rank
from vramx.nn.mlp import mlp
from vramx.nn.norm import Sources, norm, rms_norm
from vramx.nn.readers import Behind
from vramx.nn.relu import relu
from vramx.nn.sides import Side
from vramx.nn.unit_linear import gelu_linear, glu_linear, unit_linear

BF16, ORDERS = torch.bfloat16, (torch.contiguous_format, torch.channels_last)
ROWS, HIDDEN, INNER, RANK = 32, 128, 256, 4
Case = tuple[Callable[[], object], list[Tensor], float]


def pack(numel: int, keep: Compression = INT8) -> int:
    return layout_of(numel, keep.format()).buffer_bytes


def of_norm(hidden: int = HIDDEN, probe: int = 2) -> int:
    """A pack, a float a row, and a probe."""
    return pack(ROWS * hidden) + 4 * ROWS + probe


def norm_case(kind: str, hidden: int) -> Case:
    x, residual = (sample(ROWS, hidden, seed=seed, dtype=BF16) for seed in (0, 1))
    affine = [sample(hidden, seed=seed, dtype=BF16) for seed in (2, 3)][: 1 + (kind == "layer")]
    return lambda: norm_of(kind, x, affine, residual), [x, residual, *affine], of_norm(hidden)


X, Y = (sample(ROWS, HIDDEN, seed=seed, dtype=BF16) for seed in (0, 1))
WIDE = sample(ROWS, HIDDEN)
WEIGHTS = [sample(HIDDEN, HIDDEN, seed=seed, dtype=BF16) for seed in (1, 2, 3)]
FROZEN = [weight.detach() for weight in WEIGHTS]
SIDES = [Side(sample(RANK, HIDDEN, seed=9 + seed, dtype=BF16), 0.1) for seed in range(3)]
BIAS = sample(HIDDEN, dtype=BF16)
OF_SIDES = [side.weight for side in SIDES]
INTO, OUT, GATE = sample(INNER, HIDDEN), sample(HIDDEN, INNER), sample(INNER, HIDDEN, seed=1)


def autocast(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with torch.autocast("cpu", BF16):
        return function(*arguments, **options)


def two(of: Any, keep: Any = None) -> Tensor:
    return two_linears(of, TwoLinears([INTO, OUT], [None, None], "gelu"), WIDE, keep)


OF_ROWS: dict[str, Case] = {
    "gelu": (lambda: gelu(X), [], pack(X.numel()) + 2),
    "gelu_linear": (lambda: gelu_linear(X, *WEIGHTS[:1]), WEIGHTS, pack(X.numel()) + 2),
    "relu": (lambda: relu(X), [], X.numel() // 8),
    "swiglu": (lambda: swiglu(X, Y), [], 2 * (pack(X.numel()) + 2)),
    "glu_linear": (lambda: glu_linear(X, Y, *WEIGHTS[:1]), WEIGHTS, 2 * (pack(X.numel()) + 2)),
    "swiglu, int4": (
        lambda: swiglu(X, Y, keep=INT4), [], 2 * (pack(X.numel(), INT4) + 2)
    ),
    "glu_linear, int4": (
        lambda: glu_linear(X, Y, *WEIGHTS[:1], keep=INT4), WEIGHTS,
        2 * (pack(X.numel(), INT4) + 2),
    ),
    **{f"{kind} norm of {n}": norm_case(kind, n) for kind in ("rms", "layer") for n in (96, 256)},
    "norm after dropout, exact": (
        lambda: norm(Sources(X, WIDE, 0.3), (None, None), (1e-5, True), EXACT),
        [X, WIDE], WIDE.nbytes + 4 * ROWS + 4 + 16,
    ),
    "linears": (lambda: linears(X, WEIGHTS), WEIGHTS, pack(X.numel()) + 2),
    "linears of a norm": (lambda: linears(rms_norm(X), WEIGHTS), [X, *WEIGHTS], of_norm()),
    "linears of a norm, autocast": (
        lambda: autocast(lambda: linears(rms_norm(WIDE), [INTO])), [WIDE, INTO], of_norm(probe=4),
    ),
    "frozen linears with sides": (
        lambda: linears(rms_norm(X), FROZEN, sides=SIDES), [X, *FROZEN, *OF_SIDES],
        of_norm() + 3 * 16,  # and the keys of masks
    ),
    "unit with a side alone": (
        lambda: unit_linear([X, X * 2], "silu", Behind(side=SIDES[0]), None), [X, OF_SIDES[0]],
        2 * pack(X.numel()) + 2 * 2 + 16,
    ),
    "low-rank product": (
        lambda: add_low_rank(X, X[:, :RANK] * 2, WEIGHTS[0][:, :RANK]), [X, *WEIGHTS],
        2 * ROWS * RANK,
    ),
    "mlp": (lambda: mlp(rms_norm(WIDE), [INTO, OUT]), [WIDE, INTO, OUT], of_norm(probe=4)),
    "gated mlp, autocast": (
        lambda: autocast(lambda: mlp(rms_norm(WIDE), [INTO, GATE, OUT], residual=WIDE)),
        [WIDE, INTO, GATE, OUT], of_norm(probe=4),
    ),
    "two linears of a norm": (
        lambda: two(rms_norm(WIDE)), [WIDE, INTO, OUT], of_norm(probe=4) + pack(ROWS * INNER),
    ),
    "two linears of a norm, autocast": (
        lambda: autocast(lambda: two(rms_norm(WIDE))), [WIDE, INTO, OUT],
        of_norm(probe=4) + pack(ROWS * INNER),
    ),
    "two linears, exact": (lambda: two(WIDE, EXACT), [WIDE, INTO, OUT], 4 * ROWS * INNER),
    "dropout": (lambda: dropout(X, 0.1), [], 16),
    "dropout and addition": (lambda: dropout_add(X, WIDE, 0.1), [], 16),
    "loss": (
        lambda: linear_cross_entropy(X, WEIGHTS[0], torch.arange(ROWS), BIAS), [],
        # The gradients; that of the bias is summed in float32, as the factor of the mean is.
        X.nbytes + WEIGHTS[0].nbytes + 4 * HIDDEN + 4,
    ),
    "loss, frozen": (
        lambda: linear_cross_entropy(X, FROZEN[0], torch.arange(ROWS)), [], X.nbytes + 4,
    ),
}  # fmt: skip

Q, K, V = (sample(2, 6, n, 16, seed=n).detach().transpose(1, 2).requires_grad_() for n in (8, 2, 2))
PROJECTION = sample(5, 128, seed=6)


def attended(projected: bool) -> Tensor:
    y, kept = scaled_dot_product_attention(Q, K, V, enable_gqa=True)
    return linear(y.transpose(1, 2).flatten(2), PROJECTION, kept=kept) if projected else y


def with_behind(weight: Tensor, side: Side | None = None) -> object:
    return attention_linear((Q, K, V), Behind(weight, None, None, side), enable_gqa=True)


A_SIDE, ANGLES = Side(sample(3, 128, seed=8)), sample(2, 1, 6, 16).detach()
OF_HEADS: dict[str, Case] = {
    "attention": (lambda: attended(False), [Q, K, V], pack(V.numel()) + 4),
    "attention, projected": (
        lambda: attended(True), [Q, K, V, PROJECTION], pack(V.numel()) + pack(Q.numel()) + 2 * 4,
    ),
    "attention of a projection": (
        lambda: with_behind(PROJECTION), [Q, K, V, PROJECTION], pack(V.numel()) + 4,
    ),
    "attention of a frozen projection": (
        lambda: with_behind(PROJECTION.detach(), A_SIDE), [Q, K, V, PROJECTION, A_SIDE.weight],
        pack(V.numel()) + 4,
    ),
    "rotary": (lambda: rotary(Q, K, ANGLES, ANGLES), [ANGLES], 0),
}  # fmt: skip

SHAPE = (8, 66, 16, 16)
KERNEL = sample(8, 66, 3, 3, dtype=BF16)
AFFINE = affine_of(SHAPE, torch.float32)
CONSTANTS = torch.zeros(66), torch.ones(66)


def norm_and_convolution(kind: str, order: Any) -> Case:
    x, channels = image(0, SHAPE, order, BF16), 66 if kind == "batch" else 8 * 66
    return (
        lambda: conv2d(ours(kind, x, AFFINE, activation="relu"), KERNEL), [x, KERNEL, *AFFINE],
        pack(x.numel()) + x.numel() // 8 + 4 * channels + 2,
    )  # fmt: skip


def norm_by_constants(word: str, adds: bool, order: Any) -> Case:
    """Its weight does not learn: at most the sign is kept, and a factor a channel."""
    x, residual = (image(seed, SHAPE, order, BF16) for seed in (0, 1))
    affine = [each.detach() for each in AFFINE]
    how: Any = {"activation": word, "residual": residual if adds else None, "keep": INT8}
    bits = 0 if word == "none" else x.numel()
    return lambda: batch_norm(x, *CONSTANTS, *affine, **how).y, affine, bits // 8 + 4 * 66 + 2


IMAGE = image(0, SHAPE, dtype=BF16)


def relu_and_convolution(keep: Any) -> Tensor:
    """Of an exact result the signs are those that it has."""
    return conv2d(batch_norm(IMAGE, *CONSTANTS, activation="relu", keep=keep), KERNEL, keep=keep)


def two_convolutions() -> object:
    kept = keep_input(IMAGE)
    return [conv2d(IMAGE, KERNEL, kept=kept), conv2d(IMAGE, KERNEL, stride=2, kept=kept)]


OF_IMAGES: dict[str, Case] = {
    **{
        f"{kind} norm and convolution, {order}": norm_and_convolution(kind, order)
        for kind in KINDS for order in ORDERS
    },
    **{
        f"norm by constants, {word}, {adds}, {order}": norm_by_constants(word, adds, order)
        for word in ("none", "relu", "leaky_relu") for adds in (False, True) for order in ORDERS
    },
    "norm by constants, nothing learns": (
        lambda: batch_norm(IMAGE.detach(), *CONSTANTS, activation="relu"), [], 0,
    ),
    "relu and convolution, exact": (
        lambda: relu_and_convolution(EXACT), [KERNEL], IMAGE.nbytes + 4 * 66 + 2,
    ),
    "relu and convolution": (
        lambda: relu_and_convolution(INT8), [KERNEL],
        pack(IMAGE.numel()) + IMAGE.numel() // 8 + 4 * 66 + 2 * 2,
    ),
    "two convolutions": (two_convolutions, [IMAGE, KERNEL], pack(IMAGE.numel()) + 2),
    "convolution, frozen": (lambda: conv2d(IMAGE * 1, KERNEL.detach()), [KERNEL], 0),
}  # fmt: skip
CASES = OF_ROWS | OF_HEADS | OF_IMAGES


@pytest.mark.parametrize("name", CASES)
def test_so_many_bytes_are_kept(name: str) -> None:
    function, apart, expected = CASES[name]
    assert held_bytes(function, *apart) == expected


def test_torchs_convolution_with_a_frozen_weight_keeps_its_input() -> None:
    """Of which nothing is read but the shape: ours keeps nothing."""
    held = held_bytes(lambda: functional.conv2d(IMAGE * 1, KERNEL.detach()), KERNEL)
    assert held == IMAGE.nbytes
