"""What surrounds a program: the mode of the step, and how its activations are packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Who packs: a context around the call, the decorated module, a decorated function, or nobody, so
# that only the program's own regions are packed.
STYLES = ("context", "module", "function", "none")


@dataclass(frozen=True)
class Setting:
    """One way to run a program.

    Args:
        style: one of STYLES.
        options: fields of vramx.Compression.
        training: False runs the program after eval().
        exact: only modules pack, and after eval() they do not.
        autocast: run the forward pass in bfloat16 where autocast does.
        double: add a penalty on the gradient of the input to the loss.
        forces: that gradient is exact, from the second step on.
        learns_input: the input requires a gradient; else it is a batch of data.
        raw: the columns of the input differ in scale by up to 10,000.
        retain: run backward twice through one graph, and keep the second gradient.
        smooth: all that a program does is smooth, so that most of what it saves is packed.
        overwrites: a program writes past autograd; what was saved before has the old values.
        seed: of the parameters, the inputs and the noise of dropout.
    """

    style: str = "context"
    options: dict[str, Any] = field(default_factory=dict)
    training: bool = True
    exact: bool = False
    autocast: bool = False
    double: bool = False
    forces: bool = False
    learns_input: bool = True
    raw: bool = False
    retain: bool = False
    smooth: bool = False
    overwrites: bool = False
    seed: int = 0
