"""What torch's sums take beside their results, from shapes alone.

The figures are those that the caching allocator counted on an H100 (torch 2.11).
"""

from __future__ import annotations

import pytest
import torch

import vramx
from vramx.planning.fake_gpu import FakeGpu
from vramx.planning.reductions import Processors, staging_bytes

aten = torch.ops.aten


def of(func: object, shape: tuple[int, ...], *args: object, **options: object) -> int:
    gpu = FakeGpu()
    with gpu.guarded(), gpu.entered():
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return staging_bytes(func, (x, *args), {}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((8192, 2048), [0], 4 * 2048 * 128 * 32 * 4 + 4 * 16),
        ((32, 256, 2048), [0, 1], 4 * 2048 * 128 * 32 * 4 + 4 * 16),
        ((8192, 2048), [1], 0),
        ((512, 2048), [0], 0),
        ((8192, 2048), [-2], 4 * 2048 * 128 * 32 * 4 + 4 * 16),
    ],
)
def test_sums_over_rows_meet_in_memory(
    shape: tuple[int, ...], dims: list[int], expected: int
) -> None:
    assert of(aten.sum.dim_IntList, shape, dims) == expected


def test_a_smaller_gpu_splits_less() -> None:
    few = of(aten.sum.dim_IntList, (8192, 2048), [0], gpu=Processors(16, 1024))
    assert 0 < few < of(aten.sum.dim_IntList, (8192, 2048), [0]) / 8


def test_a_tensor_on_the_host_takes_nothing() -> None:
    x = torch.empty(8192, 2048)
    assert staging_bytes(aten.sum.dim_IntList, (x, [0]), {}) == 0


def test_predict_counts_the_gradient_of_a_bias() -> None:
    """Beside the gradient of the result, the weight and the input, all in bfloat16."""
    with torch.device("meta"):
        layer = torch.nn.Linear(64, 2048, dtype=torch.bfloat16)
        x = torch.empty(8192, 64, dtype=torch.bfloat16)
        slope = torch.empty(8192, 2048, dtype=torch.bfloat16)

    def step() -> None:
        layer(x).backward(slope)

    result, gradients = slope, [layer.weight, layer.bias]
    tensors = [x, slope, *layer.parameters(), result, *gradients]
    known = sum(each.numel() * each.element_size() for each in tensors)
    taken = of(aten.sum.dim_IntList, (8192, 2048), [0])
    assert vramx.predict(step, policies="live", steps=1).peak_bytes() == known + taken
