"""What the codec's kernels compile to for an H100 or H200; see machine_code_tools.py."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from machine_code_tools import MachineCode, compiled, longest_loop, parse

from vramx.kernels import launch

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

THREADS = 128
ELEMENTS = {"*bf16": 2, "*fp32": 4}
TYPES = {"buffer_ptr": "*u8", "seed_ptr": "*i64", "numel": "i64", "stream": "i64"}
TYPES |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "inner": "i32", "count": "i32"}
# Of the default formats: symmetric in groups of 128 at 8 bits, asymmetric in groups of 64 at 4.
# Memory leaves time for 23 at 3 bytes an element and for 20 at 2.56: it is the slower one. Of an
# element, two outliers a group take 7 instructions to find and to mark, and 5 to put back.
LIMITS = {
    "quantize 8 nearest": 17.0,  # of 32 elements a thread; 64 take registers that cost more
    "quantize 8 stochastic": 23.0,
    "dequantize 8": 11.5,
    "quantize 4 nearest": 12.0,
    "quantize 4 stochastic": 15.5,
    "dequantize 4": 8.0,
}
# Of kernels that pack a function of what they read: rounded to nearest, and back.
LIMITS_OF_MAPS = {
    ("normal", "group"): (28.5, 18.5),
    ("normal", "split"): (33.5, 24.5),
    ("scaled", "split"): (29.0, 22.5),
    ("root", "group"): (19.5, 12.5),
    ("tanh", "group"): (32.0, 25.0),
    ("sigmoid", "group"): (32.0, 25.0),
    ("ends of tanh", "group"): (32.0, 25.0),
    ("ends of sigmoid", "group"): (32.0, 25.0),
    ("within 6", "group"): (21.5, 12.5),
}
OF_EACH = [("normal", "each"), ("scaled", "each")]


def of_plan(plan: launch.Plan, element: str, aligned: bool = True) -> MachineCode:
    constants: dict[str, Any] = dict(plan.constants)
    if constants.get("MAP", "normal") != "normal":
        constants["mean_ptr"] = None
        if constants["MAP"] != "scaled":
            constants["rstd_ptr"] = None
    types = {**TYPES, "x_ptr": element, "out_ptr": element}
    return compiled(
        plan.kernel, types, constants, plan.tile // THREADS,
        lambda name, kind: aligned and kind[0] == "*",
    )  # fmt: skip


@lru_cache
def code_of(name: str, element: str = "*bf16", aligned: bool = True) -> MachineCode:
    """Compile what the launcher would choose for a name of LIMITS."""
    what, bits, *rounding = name.split()
    group, symmetric = (128, True) if bits == "8" else (64, False)
    if what == "dequantize":
        plan = launch.dequantize_plan(int(bits), symmetric, group)
    else:
        plan = launch.quantize_plan(int(bits), symmetric, group, rounding == ["stochastic"])
    return of_plan(plan, element, aligned)


def codes_of_map(kind: str, place: str, element: str) -> list[MachineCode]:
    back = launch.dequantize_map_plan((8, True, 128), kind, place)
    if kind.startswith("within"):  # what is packed is what comes back
        back = launch.dequantize_plan(8, True, 128)
    plans = (launch.quantize_map_plan((8, True, 128, False), kind, place), back)
    return [of_plan(plan, element) for plan in plans]


@pytest.mark.parametrize("name", LIMITS)
def test_instructions_per_element(name: str) -> None:
    assert code_of(name).per_element <= LIMITS[name]


# In float32 without noise: that is no matter of what is read and written.
@pytest.mark.parametrize(
    ("name", "element"),
    [
        *((name, "*bf16") for name in LIMITS),
        *((name, "*fp32") for name in LIMITS if "stochastic" not in name),
    ],
)
def test_data_and_codes_move_16_bytes_at_a_time(name: str, element: str) -> None:
    """All of them, so nothing is left for a narrower access; and none goes to local memory."""
    code = code_of(name, element)
    data = code.elements * ELEMENTS[element]
    codes = code.elements * int(name.split()[1]) // 8
    read, written = (codes, data) if name.startswith("dequantize") else (data, codes)
    assert (code.bytes_of("LDG"), code.bytes_of("STG")) == (read, written)
    assert not code.of_local_memory


def test_narrow_accesses_would_be_seen() -> None:
    """Of pointers that nothing is known about, the same kernel moves an element at a time."""
    code = code_of("dequantize 8", aligned=False)
    assert code.bytes_of("LDG") == code.bytes_of("STG") == 0
    assert code.per_element > LIMITS["dequantize 8"]


# In float32 of one kind: kinds differ in arithmetic, and not in what is read and written.
@pytest.mark.parametrize(
    ("kind", "place", "element"),
    [
        *((kind, place, "*bf16") for kind, place in [*LIMITS_OF_MAPS, *OF_EACH]),
        *(("normal", place, "*fp32") for place in ("split", "each")),
    ],
)
def test_a_function_on_the_way_leaves_memory_the_slower_one(
    kind: str, place: str, element: str
) -> None:
    codes = codes_of_map(kind, place, element)
    for code, moved in zip(codes, ("LDG", "STG"), strict=True):
        assert code.bytes_of(moved) == code.elements * ELEMENTS[element]
        assert not code.of_local_memory
    if element == "*bf16" and place != "each":
        limits = zip(codes, LIMITS_OF_MAPS[kind, place], strict=True)
        assert all(code.per_element <= limit for code, limit in limits)


def test_counter_stops_where_the_tile_ends() -> None:
    text = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 EXIT ;
        /*0020*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0030*/                   EXIT ;
        /*0040*/                   STL [R1], R4 ;
        /*0050*/                   NOP ;
    """
    code = parse(text, elements=2)
    assert code.per_element == 2.0
    assert code.bytes_of("LDG") == code.bytes_of("STG") == 16
    assert code.of_local_memory == ["STL"]


def test_the_longest_loop_is_found() -> None:
    text = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @P0 BRA `(.L_x_1) ;
        /*0020*/                   LDGSTS.E.128 [R4], desc[UR4][R2.64] ;
.L_x_1:
        /*0030*/             @!P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0040*/                   BRA `(.L_x_2);
    """
    assert longest_loop(text) == ["BRA", "LDGSTS.E.128", "BRA"]
