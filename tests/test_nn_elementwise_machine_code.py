"""What the elementwise kernels of vramx.nn compile to; see machine_code_tools.py.

LIMITS are instructions an element of a whole tile in bfloat16, beside what memory leaves time for.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import pytest
from machine_code_tools import MachineCode, compiled

from vramx.kernels import cross_entropy_launch, elementwise_launch, launch, rotary_launch
from vramx.kernels.layout import Layout

pytestmark = pytest.mark.slow

pytest.importorskip("triton")


def loss_plan(*, shifted: bool) -> launch.Plan:
    """Of rows of 128256 or so logits."""
    cut = cross_entropy_launch.Cut(16, 8, 4, shifted)
    return cross_entropy_launch.loss_plan((False, False), "gradient", cut, 8)


INT8 = Layout(0, bits=8, group_size=128, symmetric=True)
INT4 = Layout(0, bits=4, group_size=64, symmetric=False)
tile_plan = elementwise_launch.tile_plan
PLANS = {
    "swiglu": lambda: tile_plan("glu", "silu", INT8, True),
    "swiglu backward": lambda: tile_plan("glu_backward", "silu", INT8, True),
    "gelu": lambda: tile_plan("activation", "gelu", INT8, True),
    "gelu backward": lambda: tile_plan("activation_backward", "gelu", INT8, True),
    "swiglu, 4 bits": lambda: tile_plan("glu", "silu", INT4, True),
    "swiglu backward, 4 bits": lambda: tile_plan("glu_backward", "silu", INT4, True),
    "dropout": lambda: elementwise_launch.dropout_plan(True),
    "loss": lambda: loss_plan(shifted=False),
    "loss of odd rows": lambda: loss_plan(shifted=True),
    "rotary": lambda: rotary_launch.rotary_plan((32, 128), False, shares=True),
}
# Of a kernel: limit of instructions, bytes read and bytes written an element, headers apart.
LIMITS = {
    "swiglu": (57.5, 4, 4),  # 62 by memory
    "swiglu backward": (41.0, 4, 6),  # 78
    "gelu": (33.5, 2, 3),  # 39
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


@lru_cache
def code_of(name: str) -> MachineCode:
    plan = PLANS[name]()
    of_backward = OF_BACKWARD if plan.kernel.__name__ == "glu_backward_kernel" else {}
    types = dict.fromkeys(plan.kernel.arg_names, "*bf16") | TYPES | of_backward
    return compiled(
        plan.kernel, types, plan.constants, plan.tile // (32 * plan.constants["num_warps"]),
        # A tensor's memory, and rows where their length is a multiple of 16.
        lambda name, kind: kind[0] == "*" or name.endswith(STRIDES),
    )  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_instructions_and_accesses_of_16_bytes(name: str) -> None:
    """Every byte of data and codes moves so: nothing is left for a narrower access."""
    code, (limit, read, written) = code_of(name), LIMITS[name]
    assert code.per_element <= limit
    assert code.bytes_of("LDG") == read * code.elements
    assert code.bytes_of("STG") == written * code.elements


@pytest.mark.parametrize(("name", "others"), [("loss", 8), ("loss of odd rows", 11)])
def test_rows_of_logits_move_16_bytes_at_a_time(name: str, others: int) -> None:
    """Once each way: gradients or, in code of their own, the zeros of an ignored row.

    Narrower are, once a piece: the target, its logit and gradient, the loss twice, mail thrice; and
    an edge a thread, twice for its zero.
    """
    code = code_of(name)
    accesses = Counter(
        {op: n for op, n in code.everything.items() if op.startswith(("LDG", "STG"))}
    )
    assert accesses.pop("LDG.E.128") * 8 == code.elements
    assert accesses.pop("STG.E.128") * 8 == 2 * code.elements
    assert accesses.total() <= others


@pytest.mark.parametrize("name", ["loss", "loss of odd rows"])
def test_memory_is_the_limit_of_the_loss(name: str) -> None:
    """2 bytes read and 2 written a logit leave time for 31 instructions."""
    code = code_of(name)
    assert code.everything.total() / code.elements <= 22


def test_heads_and_their_cosines_move_16_bytes_at_a_time() -> None:
    """Per thread 8 elements of each half: of 2 blocks of x, of cos and sin, and of the results."""
    operations = code_of("rotary").everything
    moves = {op: n for op, n in operations.items() if op[:3] in ("LDG", "STG")}
    assert moves == {"LDG.E.128": 8, "STG.E.128": 4}


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_kept_in_local_memory(name: str) -> None:
    assert not code_of(name).of_local_memory
