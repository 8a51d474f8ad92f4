"""Whether paired differences are as good as zero: two one-sided t tests (TOST), and no scipy.

Equivalence is shown, not assumed: too few or too scattered pairs do not pass. Pure functions.
Source: D. J. Schuirmann, "A comparison of the two one-sided tests procedure and the power
approach", 1987.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The 95 % quantile of Student's t for 1, 2, ... degrees of freedom.
QUANTILES_95 = (
    *(6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946, 1.8595, 1.8331, 1.8125),
    *(1.7959, 1.7823, 1.7709, 1.7613, 1.7531, 1.7459, 1.7396, 1.7341, 1.7291, 1.7247),
)


@dataclass(frozen=True)
class Equivalence:
    """The mean of paired differences, its 90 % interval, and the margin it is to lie within."""

    mean: float
    low: float
    high: float
    margin: float

    @property
    def is_shown(self) -> bool:
        """Say whether both one-sided tests reject at 5 %: the interval lies within the margin."""
        return -self.margin < self.low and self.high < self.margin


def compare(differences: Sequence[float], margin: float) -> Equivalence:
    """Compare 2 to 21 paired differences with zero.

    Example:
        >>> compare([0.01, -0.01, 0.02, 0.0], margin=0.05).is_shown
        True
    """
    count = len(differences)
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / count**0.5
    half = QUANTILES_95[count - 2] * error
    return Equivalence(mean, mean - half, mean + half, margin)
