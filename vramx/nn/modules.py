"""Modules over the elementwise functions and the loss: torch's own where torch has them.

Each has the arguments and the result of what it takes the place of, and no parameters. `keep`, a
vramx.Compression or None, says how inputs are kept; None is int8. inplace=True is torch's own: what
is written over its input keeps no more than that. No state but options; any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vramx.compression.config import Compression
from vramx.nn import activation, dropout, glu, relu
from vramx.nn.loss import linear_cross_entropy


class GELU(torch.nn.GELU):
    """torch.nn.GELU that keeps its input packed.

    Example:
        >>> GELU("tanh")(torch.zeros(3))
        tensor([0., 0., 0.])
    """

    keep: Compression | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return what functional.gelu() does."""
        return activation.gelu(x, self.approximate, keep=self.keep)


class SiLU(torch.nn.SiLU):
    """torch.nn.SiLU that keeps its input packed.

    Example:
        >>> SiLU()(torch.zeros(3))
        tensor([0., 0., 0.])
    """

    keep: Compression | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return what functional.silu() does."""
        return super().forward(x) if self.inplace else activation.silu(x, keep=self.keep)


class ReLU(torch.nn.ReLU):
    """torch.nn.ReLU that keeps a bit an element; see functional.relu().

    Example:
        >>> ReLU()(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return what functional.relu() does."""
        return super().forward(x) if self.inplace else relu.relu(x)


class Dropout(torch.nn.Dropout):
    """torch.nn.Dropout that keeps no mask; see functional.dropout().

    Example:
        >>> Dropout(1.0)(torch.ones(3))
        tensor([0., 0., 0.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return what functional.dropout() does."""
        return super().forward(x) if self.inplace else dropout.dropout(x, self.p, self.training)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up, keeping both packed.

    Example:
        >>> SwiGLU()(torch.zeros(3), torch.ones(3))
        tensor([0., 0., 0.])
    """

    keep: Compression | None = None

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return what functional.swiglu() does."""
        return glu.swiglu(gate, up, keep=self.keep)


class GeGLU(torch.nn.Module):
    """gelu(gate) * up, keeping both packed.

    Example:
        >>> GeGLU("tanh")(torch.zeros(3), torch.ones(3))
        tensor([0., 0., 0.])
    """

    keep: Compression | None = None

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        activation.kind_of(approximate)  # raises where the mistake is
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return what functional.geglu() does."""
        return glu.geglu(gate, up, self.approximate, keep=self.keep)

    def extra_repr(self) -> str:
        """Name the approximation."""
        return f"approximate={self.approximate!r}"


class LinearCrossEntropy(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss of hidden weight^T + bias that never holds these logits.

    Takes the arguments of torch's but `weight` (classes are not weighted), and those of
    functional.linear_cross_entropy(). The weight of the projection is an argument of the call: it
    belongs to a Linear, or to an embedding.

    Example:
        >>> loss = LinearCrossEntropy(label_smoothing=0.1)
        >>> loss(torch.zeros(5, 8), torch.zeros(4, 8), torch.tensor([0, 1, 2, 3, -100]))
        tensor(1.3863)
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_softcap: float | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        self.logit_softcap, self.chunk = logit_softcap, chunk

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return what functional.linear_cross_entropy() does."""
        return linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            logit_softcap=self.logit_softcap,
            chunk=self.chunk,
        )
