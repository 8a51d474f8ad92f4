"""Regions, which have steps in them, and whole programs with the settings that they run in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import hypothesis.strategies as st
import torch

from tests.fuzz.settings import STYLES, Setting
from tests.fuzz.steps import EAGER, POWERS, SMOOTH, STEPS, Step, linear, step
from tests.fuzz.writer import WIDTHS, Value, Writer

DEPTH = 2  # of regions in regions
# How a region is called, by its kind: {0} is the module, {1} the value.
_REGIONS = {
    "plain": "{0}({1})",
    "decorated": "{0}({1})",
    "checkpoint": "pieces.api.checkpoint({0}, {1})",
    "checkpoint_modules": "{0}({1})",
    "torch_checkpoint": "checkpoint({0}, {1}, use_reentrant=False)",
    "torch_reentrant": "checkpoint({0}, {1}, use_reentrant=True)",
    "compiled": "{0}({1})",
    "compiled_graphs": "{0}({1})",
}
_OURS = frozenset(("checkpoint", "checkpoint_modules"))
# torch's checkpoint moves them twice a step; around one of ours they move once.
_OF_STATISTICS = frozenset(("channel_norm", "uneven_norm", "convolution_block", "weight_norm"))
_BASES = {"decorated": "pieces.Decorated", "checkpoint_modules": "pieces.Recomputed"}


def region(kind: str) -> Step:
    """Return the step that has a module of its own, which is called in the way of `kind`."""

    def write(w: Writer, h: Value) -> Value:
        compiled = kind.startswith("compiled")
        if len(w.kinds) >= DEPTH or (compiled and w.kinds) or (w.double and compiled):
            return linear(w, h)
        if any(outer.startswith("compiled") for outer in w.kinds):
            return linear(w, h)
        w.open(kind, _BASES.get(kind, "nn.Module"))
        inside = Value("x", h.width)
        w.remember(inside)
        names = [name for name in region_steps(compiled) if not w.names or name in w.names]
        if w.kinds[-1] in _OURS and any(outer.startswith("torch_") for outer in w.kinds):
            names = [each for each in names if each not in _OF_STATISTICS]
        for name in w.draw_names(names or ["linear"], 4):
            inside = take(w, inside, name)
        name = w.close(inside)
        made = f"torch.compile({name}(), backend='aot_eager')" if compiled else f"{name}()"
        call = _REGIONS[kind].format(w.module(made), h)
        w.recomputes = w.recomputes or "checkpoint" in kind
        w.packs = w.packs or "api" in _REGIONS[kind] or kind == "compiled_graphs"
        if kind == "compiled_graphs":
            result = w.let(f"{h}", inside.width)
            w.line("with pieces.api.graphs():")
            w.line(f"    {result} = {call}")
            return result
        return w.let(call, inside.width)

    return write


def region_steps(compiled: bool) -> list[str]:
    names = [name for name in STEPS if name not in ("side_stream",)]
    return [n for n in names if n not in EAGER and n not in _REGIONS] if compiled else names


for _name in _REGIONS:
    step(_name, smooth=_name in ("plain", "decorated"))(region(_name))


def take(w: Writer, h: Value, name: str) -> Value:
    """Write one step."""
    if name == "function_overwrites":
        w.spoils = True
        name = "linear" if w.double else name
    result = STEPS[name](w, h)
    w.powers += name in POWERS
    w.smooth = w.smooth and name in SMOOTH and w.powers <= 1  # the power of a power is kept
    w.remember(result)
    return result


# What more programs should have than its share in the list gives.
_OFTEN = {
    "linear": 12,
    "norm": 3,
    "rms_norm": 2,
    "skip": 4,
    "attention": 4,
    "mlp": 3,
    "channel_norm": 4,
    "checkpoint": 8,
    "checkpoint_modules": 4,
    "torch_checkpoint": 2,
    "plain": 2,
}


def usual_names() -> list[str]:
    """Return the steps, those more than once that are to be drawn more often."""
    has_cuda = torch.cuda.is_available()
    names = [name for name in STEPS if has_cuda or name != "side_stream"]
    if has_cuda:
        names.remove("array_write")
    return [name for name in names for _ in range(_OFTEN.get(name, 1))]


def left_out() -> list[str]:
    """Name the steps that this machine cannot run, and why."""
    return [] if torch.cuda.is_available() else ["side_stream (no CUDA device)"]


@st.composite
def programs(draw: Any, names: Collection[str] | None = None) -> tuple[str, Setting]:
    """Draw the source of a program, and a setting; `names` are the steps that it may have."""
    one_in = lambda n: draw(st.integers(0, n - 1)) == n - 1  # noqa: E731 - rare is not simple
    style, training = draw(st.sampled_from(STYLES)), not one_in(10)
    # An evaluated norm makes columns not alike: of a large one, only what is a thirtieth of its
    # deviation or less passes a slope that saturates, and that is the limit of eight bits.
    raw = training and one_in(5)
    double = not raw and one_in(7)
    keeps_values = style in ("context", "function") or (style == "module" and training)
    w = Writer(draw, double=double, keeps_values=keeps_values)
    w.names = frozenset(names or ())
    h = Value("x", WIDTHS[0])
    if raw:
        h = w.let(
            f"{w.module(f'nn.BatchNorm1d({h.width})')}(x.transpose(1, 2)).transpose(1, 2)", 64
        )
    w.remember(h)
    steps = list(names or usual_names())
    if names is None and one_in(6):
        steps = [name for name in steps if name in SMOOTH and name not in _REGIONS]
    for name in w.draw_names(steps, 8):
        h = take(w, h, name)
    options = {
        "min_bytes": draw(st.sampled_from((0, 1024))),
        "group_size": draw(st.sampled_from((32, 64))),
        "rounding": draw(st.sampled_from(("stochastic", "nearest"))),
        "deterministic": draw(st.booleans()),
    }
    setting = Setting(
        style=style,
        options=options,
        training=training,
        exact=not training and style in ("module", "none") and not w.packs,
        autocast=not double and one_in(6),
        double=double,
        forces=double and not w.recomputes,
        learns_input=not raw and (double or not w.learns or draw(st.booleans())),
        raw=raw,
        retain=not double and one_in(6) and not w.spoils,
        smooth=w.smooth,
        overwrites=w.overwrites,
        seed=draw(st.integers(0, 999)),
    )
    return w.source(h), setting
