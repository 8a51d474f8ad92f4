"""Every differentiable operation that torch's own tests know has the right gradient by default."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from child_processes import python

from vramx.compression.policy.exactness import needs_exact

_CHILD = Path(__file__).with_name("operations_child.py")
_LIMIT_S = 120
# At 8 bits a value is off by less than a step, which is at most (1 + 2^-7) / 126 of the largest in
# its group: scales are rounded up to 8 bits. Samples are uniform, so the largest is sqrt(3) times
# the root of their mean square. Backward multiplies two saved values at most, and the slopes of
# what it puts them through change by less than 1.13 times what they do (GELU's second derivative).
BOUND = 2 * 1.13 * 3**0.5 * (1 + 2**-7) / 126
# In 2.13 some 500 are differentiable by all their arguments; half of them save nothing.
_AT_LEAST = 400


# Whose gradients are not finite, or wrong, when they are packed.
_NOT_FINITE = ["norm.inf", "scatter_reduce.amax"]
_WRONG = ["digamma", "log1p", "log", "nn.functional.normalize", "grid_sampler_2d"]


def answers() -> dict[str, Any]:
    root = str(_CHILD.parents[1])
    environment = os.environ | {"PYTHONPATH": root}
    done = python(str(_CHILD), *_NOT_FINITE, *_WRONG, cwd=root, env=environment, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_gradients_are_right_and_some_would_not_be_if_more_were_packed() -> None:
    found = answers()
    assert found["operations"] >= _AT_LEAST
    packed = found["packed"]
    assert len(packed) > 50
    assert [name for name, (_, lost) in packed.items() if lost] == []
    assert {name: e for name, (e, _) in packed.items() if e > BOUND} == {}
    forced = found["forced"]
    assert [name for name in _NOT_FINITE if not forced[name][1]] == []
    assert [name for name in _WRONG if forced[name][0] <= BOUND] == []


@pytest.mark.parametrize(
    ("name", "args", "exact"),
    [
        ("pow", (None, 2), False),
        ("pow", (None, 0.5), True),
        ("pow", (None, 1.5), True),  # its slope has a root
        ("pow", (2, None), True),  # an exponential
        ("elu", (None,), False),
        ("elu", (None, 2.0), True),
        ("softplus", (None, 100), True),
        ("scatter_reduce", (None, 0, None, None, "sum"), False),
        ("scatter_reduce", (None, 0, None, None, "amax"), True),
        ("norm", (None, 2), True),
        ("an operation of the next release", (), True),
    ],
)
def test_it_depends_on_the_arguments(name: str, args: tuple[Any, ...], exact: bool) -> None:
    assert needs_exact(name, args, {}) is exact
