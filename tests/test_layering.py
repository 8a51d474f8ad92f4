"""The layers hold, and each rule about them notices when they do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from layering_rules import RULES

ROOT = Path(__file__).resolve().parent.parent
Rule = Callable[[Path], list[str]]
BY_NAME = {rule.__name__: rule for rule in RULES}

_NAMED = "class A(NamedTuple):\n    {}def b(self): ..."

_SKIPPED = 'timm = pytest.importorskip("timm.models")'

# Rule, file that gets the text, the text, and what the rule must say of it.
PLANTS = [
    ("includes_go_down", "csrc/core/up.h", '#include "driver/cost_table.h"', "core includes"),
    ("includes_go_down", "csrc/driver/up.h", '#include "replay/models.h"', "driver includes"),
    ("includes_go_down", "csrc/replay/up.h", '#include "bindings.h"', "replay includes"),
    ("includes_go_down", "csrc/torch/up.h", '#include "driver/sim_driver.h"', "torch includes"),
    ("includes_go_down", "csrc/helpers/new.h", "#pragma once", "'helpers' is in no table"),
    ("core_stands_alone", "csrc/core/torn.h", "#include <cuda.h>", "cuda.h"),
    ("core_stands_alone", "csrc/core/torn.h", "std::string name();", "string"),
    ("cuda_stays_in_its_driver", "csrc/core/up.h", "#include <cuda.h>", "cuda.h is CUDA's"),
    ("cuda_stays_in_its_driver", "csrc/core/up.h", "void f(CUstream s);", "CUstream"),
    ("cuda_stays_in_its_driver", "csrc/replay/up.h", "cudaStream_t stream;", "cudaStream_t"),
    ("cuda_stays_in_its_driver", "csrc/bindings.cpp", "int e = CUDA_SUCCESS;", "CUDA_SUCCESS"),
    ("cuda_stays_in_its_driver", "csrc/driver/up.h", '#include "driver/cuda_api.h"', "cuda_api.h"),
    ("torch_stays_in_the_shim", "csrc/core/up.h", "#include <c10/core/Device.h>", "c10/core"),
    ("torch_stays_in_the_shim", "csrc/bindings.cpp", "at::Tensor tensor;", "at::Tensor"),
    ("environment_is_read_in_config", "vramx/sizes.py", "os.environ['A']", "os.environ"),
    ("environment_is_read_in_config", "vramx/nn/x.py", "from os import getenv", "os.getenv"),
    ("environment_is_read_in_config", "csrc/core/up.h", 'auto a = getenv("A");', "getenv"),
    ("kernels_need_torch_and_triton_only", "vramx/kernels/x.py", "import numpy", "import numpy"),
    ("parts_meet_in_api", "vramx/kernels/x.py", "from vramx.errors import A", "imports errors"),
    ("parts_meet_in_api", "vramx/memory/x.py", "import vramx.allocator", "imports allocator"),
    ("parts_meet_in_api", "vramx/memory/x.py", "from ..cli import main", "imports cli"),
    ("parts_meet_in_api", "vramx/nn/x.py", "from vramx import replay", "imports __init__"),
    ("parts_meet_in_api", "vramx/allocator/x.py", "from vramx import nn", "imports nn"),
    ("parts_meet_in_api", "vramx/oddity.py", "", "'oddity' is in no table"),
    ("named_tuples_compile", "vramx/nn/x.py", _NAMED.format("@property\n    "), "property"),
    ("only_the_command_line_prints", "vramx/memory/x.py", "print(1)", "print"),
    ("only_the_command_line_prints", "vramx/sizes.py", "sys.stderr.write('')", "sys.stderr"),
    ("only_the_command_line_prints", "csrc/core/up.h", 'auto a = printf("");', "printf"),
    ("only_the_command_line_prints", "csrc/driver/up.h", "auto& a = std::cerr;", "std::cerr"),
    ("the_map_names_every_file", "csrc/core/unheard_of.h", "#pragma once", "core/unheard_of"),
    ("the_map_names_every_file", "csrc/README.md", "`core/gone.h`", "core/gone does not exist"),
    ("files_are_short", "csrc/core/units.h", "\n" * 300, "of at most 300"),
    ("library_tests_run", "tests/test_x.py", _SKIPPED, "without timm, and not in the Makefile"),
]

# What looks like a violation and is none.
INNOCENT = [
    ("cuda_stays_in_its_driver", "csrc/core/up.h", "// as cudaFree does, and CUstream\n"),
    ("cuda_stays_in_its_driver", "csrc/core/up.h", 'auto s = "cuMemCreate";'),
    ("cuda_stays_in_its_driver", "csrc/driver/cuda_more.h", "CUstream stream;"),
    ("torch_stays_in_the_shim", "csrc/torch/shim.cpp", "at::Tensor tensor;"),
    ("environment_is_read_in_config", "vramx/config.py", "os.environ['A']"),
    ("environment_is_read_in_config", "vramx/sizes.py", "'''os.environ is not read here.'''"),
    ("kernels_need_torch_and_triton_only", "vramx/kernels/x.py", "import triton.language as tl"),
    ("parts_meet_in_api", "vramx/nn/x.py", "from vramx.kernels import quantize"),
    ("parts_meet_in_api", "vramx/memory/x.py", "from . import trace\nfrom vramx import _core"),
    ("named_tuples_compile", "vramx/nn/x.py", _NAMED.format("")),
    ("only_the_command_line_prints", "vramx/cli/x.py", "print(1)"),
    ("only_the_command_line_prints", "vramx/progress.py", "import sys\nsys.stderr.isatty()"),
    ("only_the_command_line_prints", "csrc/core/up.h", "auto n = snprintf(a, 1, b);"),
    ("library_tests_run", "tests/test_x.py", 'pytest.importorskip("triton")'),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with nothing in it but the map of csrc; plant() adds a file."""
    (tmp_path / "csrc").mkdir()
    shutil.copyfile(ROOT / "csrc/README.md", tmp_path / "csrc/README.md")
    return tmp_path


def plant(tree: Path, path: str, text: str) -> None:
    """Add a file: what it is in this repository, and a text behind that."""
    before = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(f"{before}\n{text}\n")


@pytest.mark.parametrize("rule", RULES, ids=BY_NAME)
def test_the_repository_keeps(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(("name", "path", "text", "said"), PLANTS)
def test_a_planted_violation_is_seen(
    tree: Path, name: str, path: str, text: str, said: str
) -> None:
    known = set(BY_NAME[name](tree))
    plant(tree, path, text)
    seen = set(BY_NAME[name](tree)) - known
    assert len(seen) == 1
    assert said in seen.pop()


@pytest.mark.parametrize(("name", "path", "text"), INNOCENT)
def test_what_only_looks_like_a_violation_passes(
    tree: Path, name: str, path: str, text: str
) -> None:
    known = BY_NAME[name](tree)
    plant(tree, path, text)
    assert BY_NAME[name](tree) == known


def test_every_rule_has_a_planted_violation() -> None:
    assert {name for name, *_ in PLANTS} == set(BY_NAME)
