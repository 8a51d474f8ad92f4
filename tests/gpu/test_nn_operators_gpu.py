"""Every operator on a GPU through torch.library: what watches operations changes no result.

What torch.library asks of an operator depends on the kernels that it calls: that no result lies
where an argument or another one does, and that fakes have shapes and strides as results have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_nn_operators import FUNCTIONS, HIDDEN, ONCE_ONLY, Watch, attend
from torch import Tensor

import vramx

pytestmark = pytest.mark.gpu

EVERY: dict[str, Any] = {
    **FUNCTIONS,
    **ONCE_ONLY,
    "attention, dropout": lambda x, w: attend(x, w, dropout_p=0.25),
    "attention, causal": lambda x, w: attend(x, w, is_causal=True),
}
# They make tensors of their own, on the device that a mode says.
UNDER_A_MODE = {"attention, mask", "conv2d of batch_norm, given", *ONCE_ONLY}
TESTS = ("test_schema", "test_faketensor")


def outcome(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return a function's result and its gradients."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (
        torch.randn(rows, HIDDEN, device="cuda", generator=generator).to(dtype).requires_grad_()
        for rows in (4, HIDDEN)
    )
    torch.manual_seed(0)
    vramx.manual_seed(0, rank=0)
    y = EVERY[name](x, w / HIDDEN**0.5)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, w))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", EVERY)
def test_who_watches_sees_what_was_declared_and_changes_nothing(
    name: str, dtype: torch.dtype
) -> None:
    with torch.device("cuda"), Watch() as watch:
        watched = outcome(name, dtype)
    assert all(bool(x.isfinite().all()) for x in watched)
    if name not in UNDER_A_MODE:
        assert all(map(torch.equal, outcome(name, dtype), watched))
    for operator, arguments, options in watch.calls:
        torch.library.opcheck(operator, arguments, options, test_utils=TESTS)
