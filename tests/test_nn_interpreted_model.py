"""A whole model's step with the kernels as Triton interprets them, at the shapes of its blocks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from child_processes import python

pytest.importorskip("triton")

_CHILD = Path(__file__).with_name("interpreted_model_child.py")
_LIMIT_S = 120
# Some ten operations follow each other, each a sum of up to 128 float32 terms in another order: so
# many roundings, whose signs are random.
_ERROR = 10 * 128**0.5 * 2**-24


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    root = str(_CHILD.parents[1])
    environment = os.environ | {"PYTHONPATH": root}
    done = python(str(_CHILD), cwd=root, env=environment, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_swapped_encoder_layer_has_the_gradients(kind: str, errors: Any) -> None:
    assert len(errors[kind]) == 13
    assert {name: error for name, error in errors[kind].items() if not error <= _ERROR} == {}
