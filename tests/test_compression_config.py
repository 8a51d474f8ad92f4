"""The options of compression: what is accepted, how a mistake reads, how policies merge."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vramx.compression.config import (
    GROUP_SIZES,
    MASK_FORMAT,
    Compression,
    Format,
    Rule,
)
from vramx.errors import InvalidValueError

MISTAKES: list[tuple[type[Any], dict[str, Any], str]] = [
    (Compression, {"level": "int3"}, "level 'int3' .* 'keep', 'int8' and 'int4'"),
    (Compression, {"level": 8}, "level 8"),
    (Compression, {"level": "Int8"}, "did you mean 'int8'"),
    (Compression, {"group_size": 100}, "group_size 100 .* powers of two from 16 to 1024"),
    (Compression, {"group_size": 8}, "group_size 8 "),
    (Compression, {"group_size": 2048}, "group_size 2048"),
    (Compression, {"rounding": "stocastic"}, "did you mean 'stochastic'"),
    (Compression, {"rounding": "Nearest"}, "did you mean 'nearest'"),
    (Compression, {"rounding": None}, "rounding None .* 'stochastic' and 'nearest'"),
    (Compression, {"symmetric": 1}, "symmetric 1 .* True, False and None"),
    (Compression, {"min_bytes": -1}, "min_bytes: size -1"),
    (Compression, {"min_bytes": "1Mi"}, "min_bytes: size '1Mi'"),
    (Compression, {"offload": "gpu"}, "offload 'gpu' .* 'cpu' and a fraction"),
    (Compression, {"offload": "CPU"}, "did you mean 'cpu'"),
    (Compression, {"offload": 1.5}, r"offload 1\.5"),
    (Compression, {"offload": float("nan")}, "offload nan"),
    (Compression, {"offload": True}, "offload True"),
    (Compression, {"strict": 1}, "strict 1 .* True and False"),
    (Compression, {"deterministic": "no"}, "deterministic 'no'"),
    (Compression, {"policy": {"linear": "kep"}}, "'linear'.*did you mean 'keep'"),
    (Compression, {"policy": {"linear": 1}}, "'linear': level 1 .* 'keep', 'int8' and 'int4'"),
    (Compression, {"policy": {"linear": True}}, "level True"),
    (
        Compression,
        {"policy": {"dropout:mask": "int8"}},
        "'dropout:mask': level 'int8' .* 'keep' and 'int1'",
    ),
    (Compression, {"policy": {"linear:x": "int8"}}, "key 'linear:x' is not understood"),
    (Compression, {"policy": {3: "int8"}}, "key 3 is not understood"),
    (
        Compression,
        {"policy": {"mul:0,1": "int8", "mul:1": "int4"}},
        "'mul:1': 'int4' contradicts .* 'int8'",
    ),
    (Compression, {"policy": ["linear"]}, "policy .* is not a mapping"),
    (Format, {"bits": 0}, "bits 0"),
    (Format, {"bits": 9}, "bits 9"),
    (Format, {"group_size": None}, "group_size None"),
    (Format, {"symmetric": None}, "symmetric None"),
    (Format, {"rounding": "up"}, "rounding 'up'"),
]


@pytest.mark.parametrize(("kind", "options", "text"), MISTAKES)
def test_a_mistake_is_named_with_what_is_accepted(kind: type[Any], options: Any, text: str) -> None:
    with pytest.raises(InvalidValueError, match=text):
        kind(**options)


@pytest.mark.parametrize("offload", [None, "cpu", 0, 0.5, 1])
def test_offload_and_sizes_accept(offload: Any) -> None:
    assert Compression(offload=offload).offload == offload
    assert Compression(min_bytes="1MiB") == Compression(min_bytes=1 << 20)


def test_options_are_values() -> None:
    first = Compression(policy={"linear": "int8", "gelu": "int4"})
    second = Compression(policy={"gelu": "int4", "linear": "int8"})
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.bits = 4  # type: ignore[misc]


def test_the_callers_mapping_is_not_kept() -> None:
    policy: dict[str, Any] = {"linear": "int8"}
    options = Compression(policy=policy)
    policy["linear"] = 4
    assert Rule("linear", None, False, "int8") in options.rules


EACH = {"group_size": 32, "symmetric": True, "rounding": "nearest"}


@pytest.mark.parametrize(
    ("options", "bits", "expected"),
    [
        ({}, (), Format(8, 128, True, "stochastic")),
        ({"level": "int4"}, (), Format(4, 64, False, "stochastic")),
        ({"level": "int4"}, (4,), Format(4, 64, False, "stochastic")),
        (EACH, (8,), Format(8, 32, True, "nearest")),  # what is given holds for every width
        (EACH, (4,), Format(4, 32, True, "nearest")),
        ({"level": "int4"}, (1,), MASK_FORMAT),
        *(({"group_size": size}, (), Format(8, size)) for size in GROUP_SIZES),
    ],
)
def test_a_format_is_of_the_width_and_of_the_options(
    options: dict[str, Any], bits: tuple[int, ...], expected: Format
) -> None:
    assert Compression(**options).format(*bits) == expected


@pytest.mark.parametrize("bits", [2, 6, True])
def test_a_format_of_another_width_is_refused(bits: Any) -> None:
    with pytest.raises(InvalidValueError, match="8, 4, and 1 for masks"):
        Compression().format(bits)


def test_a_rule_overrides_the_default_of_its_position_alone() -> None:
    rules = Compression(policy={"scaled_dot_product_attention:0": "int8"}).rules
    mine = [rule for rule in rules if rule.operation == "scaled_dot_product_attention"]
    assert mine == [
        Rule("scaled_dot_product_attention", (0,), False, "int8"),
        Rule("scaled_dot_product_attention", (1,), False, "keep"),
    ]


def test_the_special_rules_of_an_operation_come_first() -> None:
    rules = Compression(policy={"mul": "int4", "mul:1": "int8", "mul:mask": "int1"}).rules
    mine = [(rule.mask, rule.arguments) for rule in rules if rule.operation == "mul"]
    assert mine == [(True, None), (False, (1,)), (False, None)]
