"""What the kernels of the norms compile to for an H100 or H200; see machine_code_tools.py."""

from __future__ import annotations

import pytest
from machine_code_tools import MachineCode, compiled

from vramx.kernels import norm_backward_launch, norm_launch
from vramx.kernels.norm_backward_launch import BackwardPlan, Reads

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

# Instructions of the kernel, or of its loop where it has one, an element of the tile. Memory leaves
# time for 70 in the forward pass with a residual (9 bytes), 54 in the backward pass with one (7),
# 23 for the output (3).
LIMITS = {"forward": 46.0, "backward": 31.0, "output": 13.0}
TYPES = {
    **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16"),
    **dict.fromkeys(("sum_ptr", "dy_ptr", "dsum_ptr", "dx_ptr"), "*bf16"),
    **dict.fromkeys(("rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32"),
} | {"kept_ptr": "*u8", "seed_ptr": "*i64", "rows": "i64", "stream": "i64", "eps": "fp32"}


def plan_of(name: str, hidden: int) -> norm_launch.Plan:
    if name == "output":
        return norm_launch.output_plan(hidden, 128)
    return norm_launch.forward_plan(hidden, 128, True)


def backward_plan(
    hidden: int, centred: bool = True, residual: bool = True, gradient_type: str = "*bf16"
) -> BackwardPlan:
    of_gradients = {"*bf16": 2, "*fp32": 4}[gradient_type] * (1 + residual)
    return norm_backward_launch.backward_plan(
        hidden, 128, Reads(centred, residual, of_gradients + 1)
    )


def code_of(name: str, hidden: int) -> MachineCode:
    """Compile a kernel of LayerNorm, bfloat16 and int8, as the launcher would choose it."""
    from vramx.kernels import norm_forward, norm_sums

    if name == "backward":
        return backward_code(hidden)
    plan = plan_of(name, hidden)
    constants = {"CENTRED": True, "PACKED": True, "STOCHASTIC": True} | plan.constants
    if name == "sums":
        constants = {**norm_backward_launch.sums_apart_constants(hidden, 128), "PACKED": True}
    kernel = getattr(norm_sums if name == "sums" else norm_forward, f"norm_{name}_kernel")
    return compiled(kernel, TYPES, constants, elements_of(plan))


def elements_of(plan: norm_launch.Plan) -> int:
    return int(plan.elements // (32 * plan.constants["num_warps"]))


def backward_code(hidden: int, centred: bool = True, residual: bool = True,
    gradient_type: str = "*bf16",
) -> MachineCode:  # fmt: skip
    """Compile the backward kernel, of whose gradients `gradient_type` is the type."""
    from vramx.kernels.norm_backward import norm_backward_kernel

    plan = backward_plan(hidden, centred, residual, gradient_type)
    types = TYPES | dict.fromkeys(("dy_ptr", "dsum_ptr", "dx_ptr"), gradient_type)
    absent = [] if residual else ["dsum_ptr"]
    absent += [] if centred else ["dbias_ptr"]
    absent += ["dweight_ptr", "dbias_ptr"] if plan.sums_apart else []
    constants = plan.tile.constants | dict.fromkeys(absent)
    return compiled(norm_backward_kernel, types, constants, elements_of(plan.tile))


@pytest.mark.parametrize("name", LIMITS)
def test_instructions_leave_memory_the_slower_one(name: str) -> None:
    code = code_of(name, 4096)
    per_element = (code.loop or code.everything).total() / code.elements
    assert per_element <= LIMITS[name]


def is_read(op: str) -> bool:
    """Whether an instruction reads global memory, to registers or to shared memory."""
    return op.startswith(("LDG.", "LDGSTS."))


def is_write(op: str) -> bool:
    return op.startswith("STG.")


# Bytes an element: bfloat16 are 2, codes 1, shares 4. The backward kernel copies the gradients of
# two rows to shared memory before its loop and of one in it; there a thread's 8 codes are one
# access of 8 bytes.
READ = {"forward": 4 * 2, "backward": 3 * (2 * 2) + 2, "output": 2 * 2 + 1}
WRITTEN = {"forward": 2 * 2 + 1, "backward": 2 + 2 * 4, "output": 2}
# Eight bytes or less a thread: factors, headers, and the seed; backward, of three rows the factor,
# two words of headers and the codes.
MOST_NARROW = {"forward": 4, "backward": 3 * (1 + 2 + 2), "output": 4}


@pytest.mark.parametrize("name", LIMITS)
def test_rows_and_codes_move_16_bytes_at_a_time(name: str) -> None:
    code = code_of(name, 4096)
    read = sum(n for op, n in code.everything.items() if is_read(op) and "128" in op)
    assert 16 * read == READ[name] * code.elements
    assert 16 * code.everything["STG.E.128"] == WRITTEN[name] * code.elements


@pytest.mark.parametrize("name", LIMITS)
def test_groups_beyond_a_row_are_masked_whole(name: str) -> None:
    """Masked element by element, each of a thread's 16 would be an access of its own."""
    everything = code_of(name, 5120).everything
    for accesses in (is_read, is_write):
        narrow = {op: n for op, n in everything.items() if accesses(op) and "128" not in op}
        assert sum(narrow.values()) <= MOST_NARROW[name], narrow


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("forward", 16384), ("backward", 4096), ("backward", 8192), ("backward", 16384),
        ("sums", 16384),
    ],
)  # fmt: skip
def test_rows_are_not_kept_in_local_memory(name: str, hidden: int) -> None:
    assert not code_of(name, hidden).of_local_memory


def is_waited_for(op: str) -> bool:
    """Whether an operation loads to registers what a GPU returns in the order of its requests."""
    return op.split(".")[0] in ("LDG", "LDL")


@pytest.mark.parametrize(
    ("hidden", "centred", "residual"),
    [
        (4096, False, False), (4096, False, True), (4096, True, False), (4096, True, True),
        (512, False, True), (768, True, False), (8192, True, True),
    ],
)  # fmt: skip
def test_loop_of_backward_waits_for_no_load_of_its_own(
    hidden: int, centred: bool, residual: bool
) -> None:
    """One such load is waited for with the rows that were asked for before it."""
    loop = backward_code(hidden, centred, residual).loop
    assert any(op.startswith("LDGSTS.") for op in loop)
    assert not [op for op in loop if is_waited_for(op)]


def test_rows_of_floats_are_not_kept_in_local_memory() -> None:
    code = backward_code(2048, residual=False, gradient_type="*fp32")
    assert not code.of_local_memory
