"""What the kernels compile to for an H100 or H200 (sm_90), without one.

Instructions an element decide whether memory is the limit. At 4.3 TB/s and 3 bytes an element, the
132 x 4 schedulers of an H200 at 1.98 GHz have time for 23 instructions an element (one serves 32
lanes); at 2.56 bytes an element for 20. Counted are those of a whole tile: in the machine code it
lies before the first EXIT that has no condition; the short tile and the division's slow path lie
behind. The counts are those of the compiler that is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pytest

from vramx.kernels import launch

triton = pytest.importorskip("triton")

SM_90 = (90, 32)
THREADS = 128
TYPES = {"*bf16": 2, "*fp32": 4}
# Of the default formats: symmetric in groups of 128 at 8 bits, asymmetric in groups of 64 at 4.
# The limits leave memory the slower one but of stochastic rounding to 8 bits. Of an element, two
# outliers a group take 7 instructions to find and to mark, and 5 to put back.
LIMITS = {
    "quantize 8 nearest": 17.0,  # of 32 elements a thread; 64 take registers that cost more
    "quantize 8 stochastic": 27.0,
    "dequantize 8": 11.5,
    "quantize 4 nearest": 12.0,
    "quantize 4 stochastic": 15.5,
    "dequantize 4": 8.0,
}


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel: the operations of a whole tile, all of them, and of how many elements."""

    tile: Counter[str]
    everything: Counter[str]
    elements: int  # of one thread
    loop: Counter[str] = field(default_factory=Counter)  # the longest one

    def bytes_of(self, operation: str) -> int:
        """The bytes of a thread that go through operations of 16 bytes with this name."""
        return 16 * self.tile[f"{operation}.E.128"]

    @property
    def per_element(self) -> float:
        return self.tile.total() / self.elements


class Compiler:
    """Compiles to a folder of its own, each kernel once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, str, bool], MachineCode] = {}

    def __call__(self, name: str, element: str = "*bf16", aligned: bool = True) -> MachineCode:
        key = (name, element, aligned)
        if key not in self._known:
            plan = plan_of(name)
            cubin = compiled(plan, element, aligned)
            self._known[key] = machine_code(cubin, self._folder, plan.tile // THREADS)
        return self._known[key]


@pytest.fixture(scope="module")
def code_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    if not isinstance(launch.mask_plan(packs=True).kernel, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing compiles in this process")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        pytest.skip("triton before 3.3 describes what it compiles in another way")
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield Compiler(folder)


def plan_of(name: str) -> launch.Plan:
    """Return what the launcher would choose for a name of LIMITS."""
    what, bits, *rounding = name.split()
    group, symmetric = (128, True) if bits == "8" else (64, False)
    if what == "dequantize":
        return launch.dequantize_plan(int(bits), symmetric, group)
    return launch.quantize_plan(int(bits), symmetric, group, rounding == ["stochastic"])


def compiled(plan: launch.Plan, element: str, aligned: bool) -> bytes:
    kernel = plan.kernel
    types = dict.fromkeys(("x_ptr", "out_ptr"), element)
    types |= {"buffer_ptr": "*u8", "seed_ptr": "*i64", "numel": "i64", "stream": "i64"}
    absent = set()  # pointers
    if plan.constants.get("MAP") == "normal":
        types |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "inner": "i32", "count": "i32"}
    elif "MAP" in plan.constants:
        types |= {"inner": "i32", "count": "i32"}
        absent = {"mean_ptr", "rstd_ptr"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    pointers = [name for name, kind in signature.items() if kind.startswith("*")]
    constants = {name: value for name, value in plan.constants.items() if name in place}
    constants |= dict.fromkeys(absent)
    source = triton.compiler.ASTSource(
        kernel,
        signature,
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in pointers if aligned},
    )
    binary = triton.compile(
        source,
        target=triton.backends.compiler.GPUTarget("cuda", *SM_90),
        options={name: plan.constants.get(name) for name in ("num_warps", "maxnreg")},
    )
    cubin: bytes = binary.asm["cubin"]
    return cubin


def machine_code(cubin: bytes, folder: Path, elements: int) -> MachineCode:
    return parse(disassembled(cubin, folder), elements)


@lru_cache
def disassembled(cubin: bytes, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    done = subprocess.run(
        [find_disassembler(), "-c", "-ndf", str(file)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def parse(text: str, elements: int) -> MachineCode:
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)
    operations = [name for _, name in found if name != "NOP"]
    ends = (i for i, (condition, name) in enumerate(found) if name == "EXIT" and not condition)
    end = next(ends, len(found))
    tile = [name for _, name in found[: end + 1] if name != "NOP"]
    return MachineCode(Counter(tile), Counter(operations), elements, Counter(longest_loop(text)))


def longest_loop(text: str) -> list[str]:
    """Return the operations from a label to the branch back to it, where those are the most."""
    begins: dict[str, int] = {}
    operations: list[str] = []
    loop: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            begins[label[1]] = len(operations)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            operations.append(found[1])
            target = re.search(r"\.L_x_\d+", found[2]) if found[1].startswith("BRA") else None
            begin = begins.get(target[0]) if target else None
            if begin is not None and len(operations) - begin > len(loop):
                loop = operations[begin:]
    return loop


def find_disassembler() -> str:
    """Triton brings its own; one of a CUDA toolkit does as well."""
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    found = str(own) if own.exists() else shutil.which("nvdisasm")
    if found is None:
        pytest.skip("no nvdisasm: neither in triton nor on the path")
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_instructions_per_element(name: str, code_of: Compiler) -> None:
    code = code_of(name)
    print(f"{name}: {code.per_element:.2f} instructions an element, limit {LIMITS[name]}")
    assert code.per_element <= LIMITS[name]


@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize("name", LIMITS)
def test_data_and_codes_move_16_bytes_at_a_time(name: str, element: str, code_of: Compiler) -> None:
    """Every byte of data and of codes does, so nothing of them is left for a narrower access."""
    code = code_of(name, element)
    data = code.elements * TYPES[element]
    codes = code.elements * int(name.split()[1]) // 8
    read, written = (codes, data) if name.startswith("dequantize") else (data, codes)
    assert code.bytes_of("LDG") == read
    assert code.bytes_of("STG") == written


@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize("name", LIMITS)
def test_nothing_is_kept_in_local_memory(name: str, element: str, code_of: Compiler) -> None:
    code = code_of(name, element)
    assert not [op for op in code.everything if op.split(".")[0] in ("LDL", "STL")]


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
    assert code.everything["STL"] == 1


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


def test_narrow_accesses_would_be_seen(code_of: Compiler) -> None:
    """Of pointers that nothing is known about, the same kernel moves an element at a time."""
    code = code_of("dequantize 8", aligned=False)
    assert code.bytes_of("LDG") == code.bytes_of("STG") == 0
    assert code.per_element > LIMITS["dequantize 8"]
