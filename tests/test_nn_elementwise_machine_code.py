"""What the elementwise kernels of vramx.nn compile to for an H100 or H200 (sm_90), without one.

As test_kernels_machine_code.py: at 4.3 TB/s the schedulers of an H200 have time for 7.8
instructions a byte. LIMITS are instructions an element of a whole tile in bfloat16, beside what
memory leaves time for.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from test_kernels_machine_code import SM_90, MachineCode, machine_code

from vramx.kernels import cross_entropy_launch, elementwise_launch, launch, rotary_launch
from vramx.kernels.layout import Layout

triton = pytest.importorskip("triton")


def loss_plan(*, shifted: bool) -> launch.Plan:
    """Of rows of 128256 or so logits."""
    cut = cross_entropy_launch.Cut(16, 8, 4, shifted)
    return cross_entropy_launch.loss_plan((False, False), "gradient", cut, 8)


INT8 = Layout(0, bits=8, group_size=128, symmetric=True)
INT4 = Layout(0, bits=4, group_size=64, symmetric=False)
PLANS = {
    "swiglu": lambda: elementwise_launch.tile_plan("glu", "silu", INT8, True),
    "swiglu backward": lambda: elementwise_launch.tile_plan("glu_backward", "silu", INT8, True),
    "gelu": lambda: elementwise_launch.tile_plan("activation", "gelu", INT8, True),
    "gelu backward": lambda: elementwise_launch.tile_plan(
        "activation_backward", "gelu", INT8, True
    ),
    "swiglu, 4 bits": lambda: elementwise_launch.tile_plan("glu", "silu", INT4, True),
    "swiglu backward, 4 bits": lambda: elementwise_launch.tile_plan(
        "glu_backward", "silu", INT4, True
    ),
    "dropout": lambda: elementwise_launch.dropout_plan(True),
    "loss": lambda: loss_plan(shifted=False),
    "loss of odd rows": lambda: loss_plan(shifted=True),
    "rotary": lambda: rotary_launch.rotary_plan((32, 128), False, shares=True),
}
# Of a kernel: limit of instructions, bytes read and bytes written an element, headers apart.
LIMITS = {
    "swiglu": (65.0, 4, 4),  # 62 by memory
    "swiglu backward": (41.0, 4, 6),  # 78
    "gelu": (37.0, 2, 3),  # 39
    "gelu backward": (35.0, 3, 4),  # 55
    "swiglu, 4 bits": (42.0, 4, 3),  # 55
    "swiglu backward, 4 bits": (36.0, 3, 6),  # 70
    "dropout": (18.0, 4, 2),  # 47
}
TYPES = {
    "numel": "i64", "stream": "i64", "gate_stream": "i64", "up_stream": "i64", "kept": "i32",
    "scale": "fp32", "seed_ptr": "*i64", "key_ptr": "*i64", "targets_ptr": "*i64",
    "losses_ptr": "*fp32", "weights_ptr": "*fp32", "row_stride": "i64", "classes": "i32",
    "ignored": "i64", "smoothing": "fp32", "cap": "fp32", "zero": "i32", "mail_ptr": "*i64",
    **dict.fromkeys(("buffer_ptr", "gate_buffer_ptr", "up_buffer_ptr", "kept_ptr"), "*u8"),
    **dict.fromkeys(("rows", "heads", "tokens"), "i32"),
    **dict.fromkeys((f"{x}_{of}" for x in "xyc" for of in ("batch", "head", "token")), "i32"),
}  # fmt: skip
STRIDES = ("_stride", "_batch", "_head", "_token", "classes")
OF_BACKWARD = {"gate_ptr": "*u8", "up_ptr": "*u8"}


@pytest.fixture(scope="module")
def code_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MachineCode]:
    if not isinstance(launch.mask_plan(packs=True).kernel, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing compiles in this process")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        pytest.skip("triton before 3.3 describes what it compiles in another way")
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        return {name: compiled(plan(), folder) for name, plan in PLANS.items()}


def compiled(plan: launch.Plan, folder: Path) -> MachineCode:
    kernel = plan.kernel
    types = TYPES | (OF_BACKWARD if kernel.__name__ == "glu_backward_kernel" else {})
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
    signature |= dict.fromkeys(set(plan.constants) & set(kernel.arg_names), "constexpr")
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constants = {place[name]: value for name, value in plan.constants.items() if name in place}
    # A tensor's memory, and rows where their length is a multiple of 16.
    aligned = [n for n, kind in signature.items() if kind[0] == "*" or n.endswith(STRIDES)]
    source = triton.compiler.ASTSource(
        kernel, signature, constants, {place[name]: [["tt.divisibility", 16]] for name in aligned}
    )
    target = triton.backends.compiler.GPUTarget("cuda", *SM_90)
    warps = plan.constants["num_warps"]
    options = {name: plan.constants.get(name) for name in ("num_warps", "maxnreg")}
    binary = triton.compile(source, target=target, options=options)
    return machine_code(binary.asm["cubin"], folder, plan.tile // (32 * warps))


@pytest.mark.parametrize("name", LIMITS)
def test_instructions_per_element(name: str, code_of: dict[str, MachineCode]) -> None:
    code = code_of[name]
    print(f"{name}: {code.per_element:.2f} instructions an element, limit {LIMITS[name][0]}")
    assert code.per_element <= LIMITS[name][0]


@pytest.mark.parametrize("name", LIMITS)
def test_data_and_codes_move_16_bytes_at_a_time(name: str, code_of: dict[str, MachineCode]) -> None:
    """Every byte of them does, so nothing is left for a narrower access."""
    code = code_of[name]
    _, read, written = LIMITS[name]
    assert code.bytes_of("LDG") == read * code.elements
    assert code.bytes_of("STG") == written * code.elements


@pytest.mark.parametrize(("name", "others"), [("loss", 8), ("loss of odd rows", 11)])
def test_rows_of_logits_move_16_bytes_at_a_time(
    name: str, others: int, code_of: dict[str, MachineCode]
) -> None:
    """Once each way: gradients or, in code of their own, the zeros of an ignored row.

    Narrower are, once a piece: the target, its logit and gradient, the loss twice, mail thrice; and
    an edge a thread, twice for its zero.
    """
    code = code_of[name]
    accesses = Counter(
        {op: n for op, n in code.everything.items() if op.startswith(("LDG", "STG"))}
    )
    assert accesses.pop("LDG.E.128") * 8 == code.elements
    assert accesses.pop("STG.E.128") * 8 == 2 * code.elements
    assert accesses.total() <= others


@pytest.mark.parametrize("name", ["loss", "loss of odd rows"])
def test_memory_is_the_limit_of_the_loss(name: str, code_of: dict[str, MachineCode]) -> None:
    """2 bytes read and 2 written a logit leave time for 31 instructions."""
    assert code_of[name].everything.total() / code_of[name].elements <= 22


def test_heads_and_their_cosines_move_16_bytes_at_a_time(code_of: dict[str, MachineCode]) -> None:
    """Per thread 8 elements of each half: of 2 blocks of x, of cos and sin, and of the results."""
    moves = {op: n for op, n in code_of["rotary"].everything.items() if op[:3] in ("LDG", "STG")}
    assert moves == {"LDG.E.128": 8, "STG.E.128": 4}


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_kept_in_local_memory(name: str, code_of: dict[str, MachineCode]) -> None:
    assert not [op for op in code_of[name].everything if op.split(".")[0] in ("LDL", "STL")]
