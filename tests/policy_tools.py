"""What the tests of policies share: why tensors were kept, and a module with attention inside.

Which tensors are never packed is in test_compress_skips.py, what each operation does with its own
in test_compress_policy.py, attention in test_compress_attention.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vramx.compression.hooks import compress
from vramx.compression.policy import operations

# From torch 2.14 on it is written in C, and its call tells a Function's name at the most.
apply_has_a_frame = operations._APPLY_CODE is not None
functions_have_names = pytest.mark.skipif(
    not apply_has_a_frame and sys.version_info < (3, 11),
    reason="Python 3.10 does not tell where in the source a call stands",
)


class SelfAttention(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, bias=bias, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def saved_reason(function: Callable[[], Any], **options: Any) -> dict[str, int]:
    with compress(**{"min_bytes": 0, **options}) as stats:
        function()
    found = {reason: tally.tensors for reason, tally in stats.kept.items()}
    return found | ({"packed": stats.packed.tensors} if stats.packed.tensors else {})
