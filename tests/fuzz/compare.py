"""What is a fault: a result that is not equal, a gradient that is too far off, too much kept.

A gradient is right if its cosine with the exact one is COSINE and its length is within a quarter.
Or if its error is within three times the one that the whole program has in bfloat16, as where a sum
cancels: no format of half the bits could promise more. A gradient that is smaller than that error,
as of a weight before a norm that undoes it, is zero as far as bfloat16 can tell, and has no
direction to compare; nor has one that is not finite there. Nor has one that float32 itself gets
wrong by as much, as float64 tells: of an attention that looks at one key alone nothing is left but
what rounding leaves.

The error is a random number, for stochastic rounding draws it, and the rule speaks of its size, not
of its luck: a draw that breaks the rule is drawn DRAWS times more, and then the root of the mean of
the squared errors of all, that draw's too, must be within, or the means of cosine and length. The
gradients themselves are not averaged: their noise would go with it. So no draw may be off by more
than sqrt(DRAWS + 1) times what is allowed, whatever the others are. Rounding to nearest is drawn
stochastically then, whose variance is twice as large. bfloat16's own error is as random, where a
gradient hangs on a few numbers, and is drawn as often: of programs whose numbers are a bit others.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.api import Packed, Plain
from tests.fuzz.run import STEPS, Step, UnusableError, load, run, saved_bytes
from tests.fuzz.settings import Setting

COSINE = 0.99
LENGTH = 1.25
TIMES_BFLOAT16 = 3
RATIO = 1.6
DRAWS = 8
# Of float32, with sums in another order.
EQUAL = 1e-4
# With less, statistics and small tensors decide.
_SAVED_BYTES = 32 << 10


class FaultError(AssertionError):
    """A program whose result is not right."""


def check(program: type[nn.Module] | str, setting: Setting) -> None:
    """Run a program without packing and with, and compare.

    Raises:
        FaultError: they differ by more than they may.
        UnusableError: there is nothing to compare.
    """
    if isinstance(program, str):
        program = load(program)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    expected = _exact(program, setting)
    packed = Packed(setting)
    try:
        found = run(program, setting, packed)
    except Exception as error:
        raise FaultError(f"{type(error).__name__}: {error}") from error
    for number, (exact, step) in enumerate(zip(expected, found, strict=True)):
        _check_forward(number, exact, step)
    checked = range(len(expected))
    # The first gradient of a gradient is told of, and not more.
    for number in checked[1:] if setting.double else checked:
        _check_gradients(program, setting, number, expected[number], found[number])
    if setting.smooth and setting.style != "none" and setting.training and not setting.double:
        _check_ratio(program, setting, packed.stats)


def _exact(program: type[nn.Module], setting: Setting) -> list[Step]:
    try:
        steps = run(program, setting, Plain())
    except RuntimeError as error:
        raise UnusableError(str(error)) from error
    for step in steps:
        numbers = (step.output, *step.gradients.values())
        if not all(each is None or each.isfinite().all() for each in numbers):
            raise UnusableError("not finite")
    return steps


def _check_forward(number: int, exact: Step, found: Step) -> None:
    if not torch.equal(exact.output, found.output):
        raise FaultError(f"step {number}: the forward pass gave another result")
    for name, buffer in exact.buffers.items():
        if not torch.equal(buffer, found.buffers[name]):
            raise FaultError(f"step {number}: the buffer {name} is another")


def _check_gradients(
    program: type[nn.Module], setting: Setting, number: int, exact: Step, found: Step
) -> None:
    allowed: dict[str, float] | None = None
    for name, gradient in exact.gradients.items():
        other = found.gradients[name]
        if (gradient is None) != (other is None):
            raise FaultError(f"step {number}: the gradient of {name} is {other}")
        if gradient is None or other is None:
            continue
        error = _error(other, gradient)
        _check_exact(setting, number, name, error)
        if _is_alike(other, gradient):
            continue
        if allowed is None:
            allowed = _own_errors(program, setting, number, exact)
        own = allowed.get(name, 0.0)
        if not own < 1 or error <= TIMES_BFLOAT16 * own:
            continue
        drawn = [other, *_drawn(program, setting, number, name)]
        off = _root_mean_square([_error(each, gradient) for each in drawn])
        if _are_alike(drawn, gradient):
            continue
        own = _root_mean_square([own, *_own_drawn(program, setting, number, name)])
        if not own < 1 or off <= TIMES_BFLOAT16 * own:
            continue
        raise FaultError(
            f"step {number}: the gradient of {name} has an error of {error:.3g} (cosine "
            f"{_cosine(other, gradient):.3f}), {off:.3g} in {len(drawn)} draws, {own:.3g} of its "
            "own"
        )


def _check_exact(setting: Setting, number: int, name: str, error: float) -> None:
    if setting.exact and error > 0:
        raise FaultError(f"step {number}: after eval() {name} has an error of {error:.3g}")
    if name == "slope" and setting.forces and error > EQUAL:
        raise FaultError(f"step {number}: the first gradient has an error of {error:.3g}")


def _drawn(program: type[nn.Module], setting: Setting, number: int, name: str) -> list[Tensor]:
    """Return a gradient with other draws of the noise."""
    options = {**setting.options, "rounding": "stochastic"}
    setting = replace(setting, options=options)
    drawn = [run(program, setting, Packed(setting), noise=1 + i)[number] for i in range(DRAWS)]
    found = [step.gradients[name] for step in drawn]
    return [gradient for gradient in found if gradient is not None]


def _is_alike(found: Tensor, exact: Tensor) -> bool:
    return torch.equal(found, exact) or _are_alike([found], exact)


def _are_alike(drawn: list[Tensor], exact: Tensor) -> bool:
    length = float(exact.double().norm())
    mean_length = _mean([float(found.double().norm()) for found in drawn])
    near = length / LENGTH <= mean_length <= length * LENGTH
    return near and _mean([_cosine(found, exact) for found in drawn]) >= COSINE


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _root_mean_square(values: list[float]) -> float:
    return _mean([value**2 for value in values]) ** 0.5


def _error(found: Tensor, exact: Tensor) -> float:
    difference = float((found.double() - exact.double()).norm())
    return 0.0 if difference == 0 else difference / max(float(exact.double().norm()), 1e-300)


def _cosine(found: Tensor, exact: Tensor) -> float:
    """Return it for short gradients too: torch's function has an epsilon."""
    one, other = (each.double().flatten() for each in (found, exact))
    lengths = float(one.norm()) * float(other.norm())
    return float(one @ other) / lengths if lengths else float(torch.equal(one, other))


def _own_errors(
    program: type[nn.Module], setting: Setting, number: int, exact: Step
) -> dict[str, float]:
    """Return the errors that the program has without packing: in bfloat16, and in float32."""
    narrow = _gradients(program, setting, number, torch.bfloat16)
    wide = _gradients(program, setting, number, torch.float64)
    own = {}
    for name, gradient in exact.gradients.items():
        if gradient is not None and narrow[name] is not None and wide[name] is not None:
            own[name] = max(_error(narrow[name], gradient), _error(gradient, wide[name]))
    return own


def _own_drawn(program: type[nn.Module], setting: Setting, number: int, name: str) -> list[float]:
    """Return the errors that a gradient has in bfloat16 where other numbers are rounded."""
    narrow, exact = (
        [_gradients(program, setting, number, dtype, 1 + i)[name] for i in range(DRAWS)]
        for dtype in (torch.bfloat16, torch.float32)
    )
    return list(map(_error, narrow, exact))


def _gradients(
    program: type[nn.Module], setting: Setting, number: int, dtype: torch.dtype, shift: int = 0
) -> dict[str, Any]:
    if dtype is torch.bfloat16:  # all of it, what autocast would compute in float32 too
        setting = replace(setting, autocast=False)
    try:
        return run(program, setting, Plain(), dtype, shift=shift)[number].gradients
    except RuntimeError as error:
        raise UnusableError(f"in {dtype}: {error}") from error


def _check_ratio(program: type[nn.Module], setting: Setting, stats: Any) -> None:
    torch_bytes = saved_bytes(program, setting)
    if torch_bytes < _SAVED_BYTES:
        return
    if setting.autocast:
        # Of bfloat16 in groups of 32 packing keeps 1.68 times less: a tensor that is packed in two
        # forms, as the result of a tanh and as the input of a norm, counts in each.
        torch_bytes = max(torch_bytes, stats.saved_bytes // STEPS)
    kept = stats.kept_bytes / STEPS
    if torch_bytes < RATIO * kept:
        raise FaultError(f"torch saves {torch_bytes} bytes, and packed {kept:.0f} are kept")
