"""What the kernels of normalisation by channel compile to; see machine_code_tools.py."""

from __future__ import annotations

from functools import lru_cache

import pytest
from machine_code_tools import MachineCode, compiled

from vramx.kernels import channel_norm_launch as launch
from vramx.kernels.channel_norm_launch import Channels

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

THREAD_ELEMENTS = 16
# Where channels lie: within a group of the codec, groups within them, neither, a run shorter than
# a tile, and a longer one, of which an element's channel is one of two.
WAYS = {
    "rows of 64": Channels(1, 64),
    "rows of 256": Channels(1, 256),
    "rows of 96": Channels(1, 96),
    "short": Channels(196, 256),
    "long": Channels(3136, 64),
}
# Instructions of a whole tile an element. Memory leaves time, of bfloat16, for 55 in the norm with
# a residual (7.1 bytes) and 40 without, 24 for y again (3.1), 55 for g and n, or g and dx (7.1),
# and 24 for the sums (3.1). A long run's choice between two channels in each element takes the norm
# above both.
LIMITS = {
    "channel_norm": 54.5,
    "channel_norm_output": 26.0,
    "channel_norm_gradient": 22.0,
    "channel_norm_input": 35.0,
    "channel_norm_sums": 46.0,  # its loop once, and its end
}
TYPES = {
    **dict.fromkeys(("x_ptr", "residual_ptr", "y_ptr", "dy_ptr", "g_ptr", "n_ptr"), "*bf16"),
    **dict.fromkeys(("mean_ptr", "rstd_ptr", "weight_ptr", "bias_ptr"), "*fp32"),
    **dict.fromkeys(("slope_ptr", "offset_ptr", "along_ptr", "shares_ptr"), "*fp32"),
    **dict.fromkeys(("kept_ptr", "bits_ptr"), "*u8"),
    **dict.fromkeys(("numel", "stream", "inner", "channels"), "i64"),
} | {"width": "i32", "dx_ptr": "*bf16", "seed_ptr": "*i64", "leak": "fp32"}
# Of a thread's 16 elements: bfloat16 in 32 bytes, codes in 16.
WIDE_READS = {"channel_norm": 4, "channel_norm_output": 1, "channel_norm_gradient": 3}
WIDE_READS |= {"channel_norm_input": 3, "channel_norm_sums": 3}
WIDE_WRITES = {"channel_norm": 3, "channel_norm_output": 2, "channel_norm_gradient": 4}
WIDE_WRITES |= {"channel_norm_input": 4, "channel_norm_sums": 0}


@lru_cache
def code_of(name: str, way: str, keeps: bool = True) -> MachineCode:
    """Compile a kernel of BatchNorm with a residual and ReLU; `keeps`: n, beside the bits."""
    channels = WAYS[way]
    if name == "channel_norm_sums":
        plan = launch.sums_plan(channels.number, (128, True))
    else:
        plan = launch.plan_of(name, channels, keeps, (128, True))
    constants = {**plan.constants, "KIND": "leaky_relu", "STOCHASTIC": keeps}
    return compiled(
        plan.kernel, TYPES, constants, THREAD_ELEMENTS,
        # Of pointers, and of a width: the launcher's own rule.
        lambda name, kind: kind[0] == "*" or name == "width",
    )  # fmt: skip


CASES = [
    *(("channel_norm", way) for way in WAYS),
    ("channel_norm_output", "rows of 64"),
    ("channel_norm_output", "short"),
    ("channel_norm_gradient", "long"),
    ("channel_norm_input", "rows of 96"),
    ("channel_norm_input", "long"),
    ("channel_norm_sums", "rows of 64"),
    ("channel_norm_sums", "rows of 256"),
]
every_case = pytest.mark.parametrize(("name", "way"), CASES)


@every_case
def test_instructions_leave_memory_the_slower_one(name: str, way: str) -> None:
    code = code_of(name, way)
    assert code.per_element <= LIMITS[name]
    assert not code.of_local_memory


# Without n: x, the residual and y; dy, g and dx; 6.1 bytes, for 47 instructions.
ALONE = {"channel_norm": (36.0, 4, 2), "channel_norm_input": (28.0, 2, 4)}


@pytest.mark.parametrize("way", ["rows of 96", "long"])
@pytest.mark.parametrize("name", ALONE)
def test_norm_that_keeps_bits_alone_touches_nothing_else(name: str, way: str) -> None:
    code, (limit, reads, writes) = code_of(name, way, keeps=False), ALONE[name]
    assert code.per_element <= limit
    assert not code.of_local_memory
    tables = {"channel_norm": 4, "channel_norm_input": 3}[name] * THREAD_ELEMENTS // 4
    assert code.tile["LDG.E.128"] == reads + tables * way.startswith("rows")
    assert code.tile["STG.E.128"] == writes


@every_case
def test_tensors_and_codes_move_16_bytes_at_a_time(name: str, way: str) -> None:
    """What tables are read in is beside that: 16 bytes as well, or 4 a run of a channel."""
    tile = code_of(name, way).tile
    assert tile["STG.E.128"] == WIDE_WRITES[name]
    tables = {"channel_norm": 4, "channel_norm_output": 2, "channel_norm_input": 3}.get(name, 0)
    vectors = tables * THREAD_ELEMENTS // 4 if way.startswith("rows") else 0
    assert tile["LDG.E.128"] == WIDE_READS[name] + vectors
    # Four bytes or less: a run of four elements of a channel, or one channel and the next.
    assert tile["LDG.E"] <= tables * THREAD_ELEMENTS // 4 + 2
