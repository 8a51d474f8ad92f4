"""What the kernels of normalisation by channel compile to for an H100 or H200 (sm_90)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_kernels_machine_code import SM_90, MachineCode, machine_code

from vramx.kernels import channel_norm_launch as launch
from vramx.kernels.channel_norm_launch import Channels

triton = pytest.importorskip("triton")

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
# Instructions of a whole tile an element. At 4.3 TB/s an H200 has time for 7.8 an element and byte
# moved (test_kernels_machine_code.py): of bfloat16 55 for the norm with a residual (7.1 bytes) and
# 40 without, 24 for y again (3.1), 55 for g and n, or g and dx (7.1), and 24 for the sums (3.1). A
# long run's choice between two channels in each element takes the norm above both.
LIMITS = {
    "channel_norm": 58.0,
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
    "width": "i32",
    "dx_ptr": "*bf16",
    "seed_ptr": "*i64",
    "leak": "fp32",
}
# Of a thread's 16 elements: bfloat16 in 32 bytes, codes in 16.
WIDE_READS = {"channel_norm": 4, "channel_norm_output": 1, "channel_norm_gradient": 3}
WIDE_READS |= {"channel_norm_input": 3, "channel_norm_sums": 3}
WIDE_WRITES = {"channel_norm": 3, "channel_norm_output": 2, "channel_norm_gradient": 4}
WIDE_WRITES |= {"channel_norm_input": 4, "channel_norm_sums": 0}


class Compiler:
    """Compiles kernels of BatchNorm with a residual and ReLU, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, str], MachineCode] = {}

    def __call__(self, name: str, way: str) -> MachineCode:
        if (name, way) not in self._known:
            self._known[name, way] = machine_code(
                compiled(name, WAYS[way]), self._folder, THREAD_ELEMENTS
            )
        return self._known[name, way]


@pytest.fixture(scope="module")
def code_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    from vramx.kernels import channel_norm

    if not isinstance(channel_norm.channel_norm_kernel, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing compiles in this process")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        pytest.skip("triton before 3.3 describes what it compiles in another way")
    folder = tmp_path_factory.mktemp("channels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield Compiler(folder)


def compiled(name: str, channels: Channels) -> bytes:
    if name == "channel_norm_sums":
        plan = launch.sums_plan(channels.number, (128, True))
    else:
        plan = launch.plan_of(name, channels, True, (128, True))
    kernel = plan.kernel
    constants = {**plan.constants, "KIND": "leaky_relu", "STOCHASTIC": True}
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    known = {name: value for name, value in constants.items() if name in place}
    signature = {n: "constexpr" if n in known else TYPES[n] for n in kernel.arg_names}
    source = triton.compiler.ASTSource(
        kernel,
        signature,
        {place[name]: value for name, value in known.items()},
        # Of pointers, and of a width: the launcher's own rule.
        {
            place[n]: [["tt.divisibility", 16]]
            for n, t in signature.items()
            if t[0] == "*" or n == "width"
        },
    )
    binary = triton.compile(
        source,
        target=triton.backends.compiler.GPUTarget("cuda", *SM_90),
        options={"num_warps": constants["num_warps"]},
    )
    cubin: bytes = binary.asm["cubin"]
    return cubin


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
def test_instructions_leave_memory_the_slower_one(name: str, way: str, code_of: Compiler) -> None:
    code = code_of(name, way)
    print(f"{name}, {way}: {code.per_element:.1f} an element, limit {LIMITS[name]}")
    assert code.per_element <= LIMITS[name]


@every_case
def test_tensors_and_codes_move_16_bytes_at_a_time(name: str, way: str, code_of: Compiler) -> None:
    """What tables are read in is beside that: 16 bytes as well, or 4 a run of a channel."""
    tile = code_of(name, way).tile
    assert tile["STG.E.128"] == WIDE_WRITES[name]
    tables = {"channel_norm": 4, "channel_norm_output": 2, "channel_norm_input": 3}.get(name, 0)
    vectors = tables * THREAD_ELEMENTS // 4 if way.startswith("rows") else 0
    assert tile["LDG.E.128"] == WIDE_READS[name] + vectors
    # Four bytes or less: a run of four elements of a channel, or one channel and the next.
    assert tile["LDG.E"] <= tables * THREAD_ELEMENTS // 4 + 2


@every_case
def test_nothing_is_kept_in_local_memory(name: str, way: str, code_of: Compiler) -> None:
    everything = code_of(name, way).everything
    assert not [op for op in everything if op.split(".")[0] in ("LDL", "STL")]
