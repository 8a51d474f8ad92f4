"""What vramx.nn computes around its products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vramx.nn.products import WeightSums, bias_gradient


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 511, 512, 513, 8192, 65_536 + 257, 70_000])
def test_the_gradient_of_a_bias_is_the_sum_of_the_rows(rows: int) -> None:
    x = torch.randn(rows, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    torch.testing.assert_close(bias_gradient(x, x.dtype), x.sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_rounded_once(dtype: torch.dtype) -> None:
    """Half a unit of the last place, and a thousandth of one for sums in float32 on the way."""
    x = torch.randn(20_000, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = x.double().sum(0)
    unit = torch.finfo(dtype).eps * exact.abs()
    # float32 itself: each of the 20,000 additions may round half a unit of the sum so far.
    on_the_way = torch.finfo(torch.float32).eps * x.double().abs().sum(0)
    sums = WeightSums(torch.empty(7, 3, dtype=dtype), (False, True))
    for part in x.split(3000):
        sums.add(part, x)
    for found in (bias_gradient(x, dtype), sums.results()[1]):
        assert found.dtype == dtype
        assert ((found.double() - exact).abs() <= unit / 2 + on_the_way).all()


class Copies(TorchDispatchMode):
    """The largest number of rows that are put into one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.rows = max(self.rows, len(result))
        return result


def test_sums_of_many_rows_are_not_copied() -> None:
    rows = torch.ones(1_000 * 256 + 3, 2, dtype=torch.bfloat16)
    with Copies() as copies:
        assert bias_gradient(rows, torch.float32).tolist() == [len(rows)] * 2
    assert 0 < copies.rows < 512
