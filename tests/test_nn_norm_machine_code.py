"""What the kernels of the norms compile to for an H100 or H200 (sm_90), without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_kernels_machine_code import SM_90, MachineCode, machine_code

from vramx.kernels import norm_backward_launch, norm_launch
from vramx.kernels.norm_backward_launch import BackwardPlan, Reads

triton = pytest.importorskip("triton")

# Instructions of the kernel, or of its loop where it has one, an element of the tile. At 4.3 TB/s
# an H200 has time for 7.8 an element and byte moved (test_kernels_machine_code.py): 70 for the
# forward pass with a residual (9 bytes), 54 for the backward pass with one (7), 23 for the output
# (3).
LIMITS = {"forward": 46.0, "backward": 31.0, "output": 13.0}
TYPES = {
    **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16"),
    **dict.fromkeys(("sum_ptr", "dy_ptr", "dsum_ptr", "dx_ptr"), "*bf16"),
    **dict.fromkeys(("rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32"),
    "kept_ptr": "*u8",
    "seed_ptr": "*i64",
    "rows": "i64",
    "stream": "i64",
    "eps": "fp32",
}


def triton_version() -> tuple[int, ...]:
    return tuple(map(int, triton.__version__.split(".")[:2]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from vramx.kernels import norm_forward

    if not isinstance(norm_forward.norm_forward_kernel, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing compiles in this process")
    if triton_version() < (3, 3):
        pytest.skip("triton before 3.3 describes what it compiles in another way")
    folder = tmp_path_factory.mktemp("norms")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


def plan_of(name: str, hidden: int) -> norm_launch.Plan:
    if name == "backward":
        return backward_plan(hidden).tile
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


def code_of(name: str, hidden: int, folder: Path) -> MachineCode:
    """Compile a kernel of LayerNorm, bfloat16 and int8, as the launcher would choose it."""
    from vramx.kernels import norm_forward, norm_sums

    if name == "backward":
        return backward_code(folder, hidden)
    plan = plan_of(name, hidden)
    constants = {"CENTRED": True, "PACKED": True, "STOCHASTIC": True} | plan.constants
    if name == "sums":
        constants = {**norm_backward_launch.sums_apart_constants(hidden, 128), "PACKED": True}
    kernel = getattr(norm_sums if name == "sums" else norm_forward, f"norm_{name}_kernel")
    return compiled(kernel, constants, TYPES, plan, folder)


def backward_code(
    folder: Path,
    hidden: int,
    centred: bool = True,
    residual: bool = True,
    gradient_type: str = "*bf16",
) -> MachineCode:
    """Compile the backward kernel, of whose gradients `gradient_type` is the type."""
    from vramx.kernels.norm_backward import norm_backward_kernel

    plan = backward_plan(hidden, centred, residual, gradient_type)
    types = TYPES | dict.fromkeys(("dy_ptr", "dsum_ptr", "dx_ptr"), gradient_type)
    absent = [] if residual else ["dsum_ptr"]
    absent += [] if centred else ["dbias_ptr"]
    absent += ["dweight_ptr", "dbias_ptr"] if plan.sums_apart else []
    constants = plan.tile.constants | dict.fromkeys(absent)
    return compiled(norm_backward_kernel, constants, types, plan.tile, folder)


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    plan: norm_launch.Plan,
    folder: Path,
) -> MachineCode:
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    known = {name: value for name, value in constants.items() if name in place}
    signature = {n: "constexpr" if n in known else types[n] for n in kernel.arg_names}
    source = triton.compiler.ASTSource(
        kernel,
        signature,
        {place[name]: value for name, value in known.items()},
        {place[n]: [["tt.divisibility", 16]] for n, t in signature.items() if t.startswith("*")},
    )
    binary = triton.compile(
        source,
        target=triton.backends.compiler.GPUTarget("cuda", *SM_90),
        options={name: constants.get(name) for name in ("num_warps", "maxnreg")},
    )
    threads = 32 * plan.constants["num_warps"]
    return machine_code(binary.asm["cubin"], folder, plan.elements // threads)


@pytest.mark.parametrize("name", LIMITS)
def test_instructions_leave_memory_the_slower_one(name: str, folder: Path) -> None:
    code = code_of(name, 4096, folder)
    per_element = (code.loop or code.everything).total() / code.elements
    print(f"{name}: {per_element:.1f} instructions an element, limit {LIMITS[name]}")
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
def test_rows_and_codes_move_16_bytes_at_a_time(name: str, folder: Path) -> None:
    code = code_of(name, 4096, folder)
    read = sum(n for op, n in code.everything.items() if is_read(op) and "128" in op)
    assert 16 * read == READ[name] * code.elements
    assert 16 * code.everything["STG.E.128"] == WRITTEN[name] * code.elements


@pytest.mark.parametrize("name", LIMITS)
def test_groups_beyond_a_row_are_masked_whole(name: str, folder: Path) -> None:
    """Masked element by element, each of a thread's 16 would be an access of its own."""
    everything = code_of(name, 5120, folder).everything
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
def test_rows_are_not_kept_in_local_memory(name: str, hidden: int, folder: Path) -> None:
    everything = code_of(name, hidden, folder).everything
    assert not [op for op in everything if op.split(".")[0] in ("LDL", "STL")]


def is_waited_for(op: str) -> bool:
    """Whether an operation loads to registers what a GPU returns in the order of its requests."""
    return op.split(".")[0] in ("LDG", "LDL")


@pytest.mark.parametrize(
    ("hidden", "centred", "residual"),
    [
        (4096, False, False), (4096, False, True), (4096, True, False), (4096, True, True),
        (512, False, True), (768, False, True), (768, True, False), (8192, True, True),
    ],
)  # fmt: skip
def test_loop_of_backward_waits_for_no_load_of_its_own(
    hidden: int, centred: bool, residual: bool, folder: Path
) -> None:
    """One such load is waited for with the rows that were asked for before it."""
    loop = backward_code(folder, hidden, centred, residual).loop
    assert any(op.startswith("LDGSTS.") for op in loop)
    assert not [op for op in loop if is_waited_for(op)]


def test_rows_of_floats_are_not_kept_in_local_memory(folder: Path) -> None:
    everything = backward_code(folder, 2048, residual=False, gradient_type="*fp32").everything
    assert not [op for op in everything if op.split(".")[0] in ("LDL", "STL")]
