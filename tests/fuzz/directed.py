"""A program for each planted fault, which shows it for certain: by a margin, and with no luck.

What is saved in floating numbers are often integers here, which bfloat16 holds exactly and a packed
tensor does not: whoever takes their integer part is off at every second element.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tests.fuzz.settings import Setting
from tests.fuzz.writer import HEADER

_OPTIONS = {"min_bytes": 0, "group_size": 64, "rounding": "stochastic", "deterministic": True}
# The order of a column's elements as floating numbers, through which gradients pass.
_INTEGERS = "h = h.argsort(1).to(h.dtype) + (h - h.detach())"


def program(modules: Sequence[str], lines: Sequence[str], region: Sequence[str] = ()) -> str:
    """Return a program with modules a, b, ... and lines that take h and give it."""
    made = [f"self.{chr(ord('a') + i)} = {module}" for i, module in enumerate(modules)]
    inside = _class("Region", (), region) if region else ""
    return "\n\n".join([HEADER, inside, _class("Program", made, lines)])


def _class(name: str, made: Sequence[str], lines: Sequence[str]) -> str:
    init = "\n".join(["super().__init__()", *made])
    body = "\n".join(["h = x", *lines, "return h"])
    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n{textwrap.indent(init, ' ' * 8)}\n\n"
        f"    def forward(self, x):\n{textwrap.indent(body, ' ' * 8)}\n"
    )


_LINEAR = "nn.Linear(64, 64)"
_REGION = "h = pieces.api.checkpoint(self.b, h)"
_WRITE = ("fresh = h * 1.5", "h = self.a(fresh)", "{}", "h = h + self.b(fresh)")


def setting(**fields: object) -> Setting:
    """Return a setting whose noise repeats; `rounding` is an option, the others are fields."""
    options = _OPTIONS | {key: fields.pop(key) for key in ("rounding",) if key in fields}
    return Setting(**{"options": options, "seed": 1, **fields})  # type: ignore[arg-type]


def _written(line: str) -> str:
    return program([_LINEAR, _LINEAR], [text.format(line) for text in _WRITE])


PROGRAMS: dict[str, tuple[str, Setting]] = {
    "packs the tensors of unknown Functions": (
        program(
            [_LINEAR], ["h = self.a(h)", "h = pieces.Positions.apply(h, h.argsort(1).to(h.dtype))"]
        ),
        setting(),
    ),
    "packs what operations need exactly": (
        program(["nn.Parameter(torch.ones(64))"], ["h = (h * self.a).abs().log()"]),
        setting(),
    ),
    "packs integers": (
        program([_LINEAR], ["h = self.a(h)", "h = h.gather(-1, h.argsort(-1))"]),
        setting(),
    ),
    "recomputes what is not smooth from packed inputs": (
        program(
            [_LINEAR, "Region()"],
            ["h = self.a(h)", _INTEGERS, _REGION],
            ["h = h * (1 + h.detach().floor().remainder(2))"],
        ),
        setting(style="none"),
    ),
    "recomputes Functions from packed inputs": (
        program(
            [_LINEAR, "Region()"],
            ["h = self.a(h)", _INTEGERS, _REGION],
            ["h = pieces.Compares.apply(h)"],
        ),
        setting(style="none"),
    ),
    "moves statistics twice": (
        program([_LINEAR, "nn.BatchNorm1d(16)"], ["h = self.a(h)", _REGION]),
        setting(style="none"),
    ),
    "packs what gradients of gradients read": (
        program([_LINEAR], ["h = F.gelu(self.a(h)).square()"]),
        setting(double=True, forces=True),
    ),
    "packs the batch": (
        program(["nn.Parameter(torch.logspace(2, -2, 64).diag() ** 0.1)"], ["h = h @ self.a**10"]),
        setting(raw=True, learns_input=False),
    ),
    "packs in eval()": (
        program([_LINEAR], ["h = F.gelu(self.a(h))"]),
        setting(style="module", training=False, exact=True),
    ),
    "takes data of before a write": (
        _written("fresh[:, ::2] = x.tanh()[:, 1::2]"),
        setting(overwrites=True),
    ),
    "takes data of before a hidden write": (
        _written("fresh.data.mul_(0.5)"),
        setting(overwrites=True),
    ),
    "keeps everything": (
        program([_LINEAR], ["h = self.a(h)", *["h = F.gelu(h)"] * 8]),
        setting(smooth=True),
    ),
    "leaves changed modules": (
        program([_LINEAR], ["h = F.gelu(self.a(h))"]),
        setting(style="module"),
    ),
    "packs inputs of norms as other numbers": (
        program(
            ["nn.BatchNorm1d(64)"],
            ["h = h * torch.logspace(-2, 2, 64).to(h)", "h = self.a(h.transpose(1, 2))"],
        ),
        setting(),
    ),
    "frees while a stream reads": (
        program([_LINEAR], ["h = pieces.on_side_stream(self.a, h)"]),
        setting(),
    ),
}
