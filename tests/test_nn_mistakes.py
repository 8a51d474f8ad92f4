"""Mistakes in calls of vramx.nn's functions: an error that names the value and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from vramx import nn as vnn
from vramx.errors import InvalidValueError
from vramx.nn.activation import gelu, silu
from vramx.nn.attention import attention_linear
from vramx.nn.dropout import dropout, dropout_add
from vramx.nn.feed_forward import TwoLinears, two_linears
from vramx.nn.functional import (
    batch_norm,
    conv2d,
    group_norm,
    instance_norm,
    linears,
    mlp,
    rms_norm,
    rotary,
)
from vramx.nn.glu import geglu, swiglu
from vramx.nn.loss import linear_cross_entropy
from vramx.nn.low_rank import add_low_rank
from vramx.nn.readers import Behind
from vramx.nn.sides import Side, joined
from vramx.nn.unit_linear import gelu_linear, glu_linear

ones, zeros = torch.ones, torch.zeros
ROWS, X, W, V = ones(3, 4), ones(2, 3), ones(4, 3), ones(2, 4)
HIDDEN, CLASSES, TARGETS = ones(21, 16), ones(37, 16), torch.arange(21)
IMAGE, VECTOR = ones(2, 3, 4, 4), ones(4)
trained = partial(batch_norm, IMAGE, None, None, training=True)
loss = partial(linear_cross_entropy, HIDDEN, CLASSES, TARGETS)


def two(*weights: Any, **options: Any) -> Any:
    of = TwoLinears(list(weights), [None, None], **({"activation": "gelu"} | options))
    return two_linears(X, of)


def turned(shape: tuple[int, ...], angles: tuple[int, ...]) -> Any:
    return rotary(zeros(shape), zeros(shape), zeros(angles), zeros(angles))


def attended(behind: Behind) -> Any:
    return attention_linear((ones(1, 2, 3, 4),) * 3, behind)


MISTAKES: list[tuple[str, Callable[[], object]]] = [
    ("one shape", lambda: swiglu(ROWS, ROWS[:1])),
    ("gate is a tensor of torch.int64", lambda: swiglu(ROWS.long(), ROWS)),
    ("'none' and 'tanh'", lambda: geglu(ROWS, ROWS, "sigmoid")),
    ("last size", lambda: glu_linear(ROWS, ROWS, ones(2, 5))),
    ("bias has shape", lambda: glu_linear(ROWS, ROWS, V, ones(3))),
    ("'silu', 'gelu'", lambda: glu_linear(ROWS, ROWS, V, activation="relu")),
    ("'none' and 'tanh'", lambda: gelu(ROWS, "tan")),
    ("'erf'", lambda: vnn.GeGLU("erf")),
    ("torch.bool", lambda: silu(ROWS.bool())),
    ("weight has shape", lambda: gelu_linear(ROWS, ones(4))),
    ("0 weights and 0 biases", lambda: linears(X, [])),
    ("1 weights and 2 biases", lambda: linears(X, [W], [None, None])),
    (r"weight has shape \(4, 2\)", lambda: linears(X, [ones(4, 2)])),
    (r"bias has shape \(3,\)", lambda: linears(X, [W], [ones(3)])),
    ("torch.float64", lambda: linears(X, [W.double()])),
    ("torch.int32", lambda: linears(X.int(), [W])),
    (r"its input \(\)", lambda: linears(ones(()), [W])),
    ("at least one weight", lambda: linears(X, [])),
    ("weight has shape", lambda: linears(V, [], sides=[Side(ones(2, 3))])),
    ("0 to 1", lambda: linears(V, [], sides=[Side(V, 1.5)])),
    ("not accepted as one", lambda: joined([Side(V, 0.5), Side(V, 0.5)])),
    ("weight has shape", lambda: attended(Behind(V))),
    ("bias has shape", lambda: attended(Behind(ones(3, 8), VECTOR))),
    ("float16", lambda: attended(Behind(ones(3, 8).half()))),
    ("weight has shape", lambda: attended(Behind(side=Side(V)))),
    ("base has shape", lambda: add_low_rank(V, V, ones(3, 4))),
    ("weight has shape", lambda: add_low_rank(V, V, W)),
    ("torch.int32", lambda: rms_norm(X.int())),
    (r"shape \(\)", lambda: rms_norm(ones(()))),
    (r"shape \(2, 0\)", lambda: rms_norm(ones(2, 0))),
    (r"weight has shape \(4,\)", lambda: rms_norm(X, VECTOR)),
    (r"residual \(3,\)", lambda: rms_norm(X, residual=ones(3))),
    ("keep 8", lambda: rms_norm(X, keep=8)),  # type: ignore[arg-type]
    ("1 weights and 1 biases", lambda: mlp(X, [W])),
    ("2 weights and 1 biases", lambda: mlp(X, [W, V], [None])),
    ("'relu' is not accepted", lambda: mlp(X, [W, V], activation="relu")),
    (r"the last weight has shape \(4, 3\)", lambda: mlp(X, [W, W])),
    ("one shape", lambda: mlp(X, [W, W[:3], V])),
    (r"residual has shape \(2, 3\)", lambda: mlp(X, [W, V], residual=X)),
    ("torch.float64", lambda: mlp(X, [W, V.double()])),
    ("3 weights and 2 biases", lambda: two(W, W, V)),
    ("torch.float64", lambda: two(W, V.double())),
    ("'relu' is not accepted", lambda: two(W, V, activation="relu")),
    (r"scale has shape \(3,\)", lambda: two(W, V, scale=ones(3))),
    ("of torch.bfloat16; accepted is", lambda: two(W, V, scale=ones(2).bfloat16())),
    ("even last size", lambda: turned((2, 3, 7), (3, 7))),
    (r"q has shape \(2, 3, 8\) and cos \(3, 4\)", lambda: turned((2, 3, 8), (3, 4))),
    ("broadcasts", lambda: turned((2, 3, 8), (4, 8))),
    ("broadcasts", lambda: turned((3, 8), (2, 3, 8))),
    ("'mean', 'sum'", lambda: loss(reduction="max")),
    ("accepted is int64 of shape", lambda: linear_cross_entropy(HIDDEN, CLASSES, TARGETS[1:])),
    ("torch.int32", lambda: linear_cross_entropy(HIDDEN, CLASSES, TARGETS.int())),
    ("label_smoothing", lambda: loss(label_smoothing=2)),
    ("logit_softcap 0", lambda: loss(logit_softcap=0)),
    ("chunk 0", lambda: loss(chunk=0)),
    ("last size", lambda: linear_cross_entropy(HIDDEN, CLASSES.t(), TARGETS)),
    *(
        ("accepted are 0 to 1", partial(dropout, ROWS, p))  # type: ignore[arg-type]
        for p in (-0.1, 1.1, math.nan, "0.5", True)
    ),
    ("one shape", lambda: dropout_add(ROWS, VECTOR, 0.5)),
    ("activation 'tanh'", lambda: trained(activation="tanh")),
    ("weight has shape", lambda: trained(weight=VECTOR)),
    (r"residual \(1, 3, 4, 4\)", lambda: trained(residual=IMAGE[:1])),
    ("residual is of", lambda: trained(residual=IMAGE.double())),
    ("keep 8", lambda: trained(keep=8)),
    ("in training only", lambda: batch_norm(IMAGE, None, None)),
    ("running_mean has shape", lambda: batch_norm(IMAGE, VECTOR, VECTOR)),
    ("more values a channel", lambda: batch_norm(IMAGE[:1, :, :1, :1], None, None, training=True)),
    ("num_groups 2", lambda: group_norm(IMAGE, 2)),
    ("more values", lambda: instance_norm(IMAGE[:, :, :1, :1])),
    ("accepted are both of", lambda: conv2d(IMAGE, ones(2, 3, 3))),
    ("stride", lambda: conv2d(IMAGE, ones(2, 3, 3, 3), stride=(1, 1, 1))),
]


@pytest.mark.parametrize(("words", "call"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes_are_named(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(InvalidValueError, match=words):
        call()
