"""The rules of the layers, as functions of a source tree: each returns its violations, as text.

The test runs them on this repository and on copies with a violation planted in each. Rules read the
code, not the prose: comments and string literals are taken out of C++ first, and Python is parsed.
A part that is not in a table here is a violation too, so that a new one gets its place decided.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

# What a layer of csrc may include, itself apart.
CPP_LAYERS = {
    "core": set[str](),
    "driver": {"core"},
    "replay": {"core", "driver"},
    "process": {"core", "driver"},
    "bindings": {"core", "driver", "process", "replay"},
    "torch": {"core", "process"},
    "library": {"core", "driver", "process", "torch"},
}
MOST_LINES = 300  # of a file of csrc
# A line that skips where a library is not installed that only `make test-models` installs.
_LIBRARY_TEST = re.compile(
    r"^\s*(?:[\w.]+(?:: Any)? = )?pytest\.importorskip\(\""
    r"(accelerate|lightning|monai|peft|timm|torch_geometric|torchvision|transformers)\b",
    re.MULTILINE,
)
BASE = {"errors", "files", "sizes", "config", "progress"}
# What a part of vramx may import, itself apart.
PYTHON_PARTS = {
    "errors": set[str](),
    "files": set[str](),
    "sizes": {"errors"},
    "config": {"errors", "sizes"},
    "progress": {"config"},
    "kernels": set[str](),
    "patch": {"errors"},
    "allocator": {*BASE, "_core"},
    "compression": {*BASE, "_core", "kernels", "patch"},
    "nn": {*BASE, "compression", "kernels", "patch", "recompute"},
    "recompute": {*BASE, "compression", "patch"},
    "optimizers": {*BASE, "compression", "patch"},
    "memory": {*BASE, "_core", "compression", "patch"},
    "testing": {*BASE, "memory"},
    "callbacks": {*BASE, "memory"},
    "planning": {*BASE, "compression", "memory", "nn", "optimizers", "patch", "recompute"},
}
EVERY_PART = {*PYTHON_PARTS, "_core"}
PYTHON_PARTS["_autoload"] = {"allocator", "config", "errors"}
PYTHON_PARTS["api"] = EVERY_PART
PYTHON_PARTS["__init__"] = {*EVERY_PART, "api"}
PYTHON_PARTS["cli"] = {*EVERY_PART, "api", "__init__"}
PYTHON_PARTS["__main__"] = {"cli"}

_COMMENT_OR_STRING = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | R"(?P<end>[^(]*)\(.*?\)(?P=end)" | "(?:\\.|[^"\\\n])*" """,
    re.DOTALL | re.VERBOSE,
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
_CUDA_NAME = re.compile(r"\b(?:CU(?:DA_\w+|[a-z]\w*)|cu(?:da)?[A-Z]\w*)\b")
_CUDA_HEADER = re.compile(r"(?:cuda|cuda_runtime\w*|driver_types|nv\w+)\.h|cuda/.*|.*/cuda_api\.h")
_TORCH_NAME = re.compile(r"\b(?:torch|c10|at|caffe2)::\w+")
# Of our own folder of that name one header is for others, and has nothing of torch's.
_TORCH_HEADER = re.compile(r"(?!torch/install\.h)(?:torch|c10|ATen|caffe2)/.*")
_CPP_PRINT = re.compile(r"\b(?:printf|puts|putchar)\s*\(|\bstd::(?:cout|cerr|clog|exit)\b")
_CPP_ENVIRONMENT = re.compile(r"\b(?:secure_)?getenv\s*\(")


def cpp_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each file of csrc: its path below csrc, and its text."""
    csrc = root / "csrc"
    for path in sorted([*csrc.rglob("*.h"), *csrc.rglob("*.cpp")]):
        yield path.relative_to(csrc).as_posix(), path.read_text()


def python_files(root: Path) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield each module of vramx: its path below vramx, and all nodes of its syntax tree."""
    package = root / "vramx"
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), _nodes(path.read_text())


# The test runs a rule on many copies of the repository that differ in one file.
@cache
def _nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


@cache
def code_of(text: str) -> str:
    """Return C++ without comments and with empty string literals; an #include keeps its name."""
    return _COMMENT_OR_STRING.sub(lambda match: '""' if match[0][0] in 'R"' else " ", text)


def includes_of(text: str) -> list[tuple[str, str]]:
    """Return the delimiter and the name of every #include."""
    return [(match[1], match[2]) for match in _INCLUDE.finditer(text)]


def layer_of(path: str) -> str:
    return path.split("/")[0] if "/" in path else re.sub(r"\W.*", "", path).split("_")[0]


def includes_go_down(root: Path) -> list[str]:
    found = []
    for path, text in cpp_files(root):
        layer = layer_of(path)
        if layer not in CPP_LAYERS:
            found.append(f"csrc/{path}: layer {layer!r} is in no table")
            continue
        accepted = {layer, *CPP_LAYERS[layer]}
        for delimiter, name in includes_of(text):
            if delimiter == '"' and layer_of(name) not in accepted:
                found.append(f"csrc/{path}: {layer} includes {name}")
    return found


def core_stands_alone(root: Path) -> list[str]:
    """Compile each header of the core with nothing before it but what it includes itself."""
    headers = {p: text for p, text in cpp_files(root) if layer_of(p) == "core" and p[-2:] == ".h"}
    chains = _chains(headers)
    with ThreadPoolExecutor(max_workers=2) as pool:
        outputs = pool.map(lambda chain: _syntax_errors(root, chain), chains)
        return [
            f"csrc/{chain[-1]}: {text}" for chain, text in zip(chains, outputs, strict=True) if text
        ]


def _chains(headers: dict[str, str]) -> list[list[str]]:
    """Share headers out among lists in which each includes, also through others, those before it.

    So that one compilation, in which they follow each other, serves for a list.
    """
    below = {path: _included(path, headers) for path in headers}
    waiting = sorted(headers, key=lambda path: len(below[path]))
    chains = []
    while waiting:
        chain = [waiting.pop()]
        for path in reversed(waiting):
            if path in below[chain[0]]:
                chain.insert(0, path)
        waiting = [path for path in waiting if path not in chain]
        chains.append(chain)
    return chains


def _included(path: str, headers: dict[str, str]) -> set[str]:
    """Return which of these headers one includes, also through others."""
    found: set[str] = set()
    reached = [path]
    while reached:
        names = {name for _, name in includes_of(headers[reached.pop()])}
        reached += (names & headers.keys()) - found
        found |= names & headers.keys()
    return found


def _syntax_errors(root: Path, headers: list[str]) -> str:
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", f"-I{root / 'csrc'}"]
    done = subprocess.run(
        [*command, "-x", "c++", "-"],
        input="".join(f'#include "{header}"\n' for header in headers),
        env={"PATH": os.defpath, "LC_ALL": "C"},  # no CPATH that would bring other headers in
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip() or ("failed" if done.returncode else "")


def cuda_stays_in_its_driver(root: Path) -> list[str]:
    return _cpp_words(
        root, ("driver/cuda_", "torch/"), names=_CUDA_NAME, headers=_CUDA_HEADER, what="CUDA's"
    )


def torch_stays_in_the_shim(root: Path) -> list[str]:
    return _cpp_words(root, ("torch/",), names=_TORCH_NAME, headers=_TORCH_HEADER, what="torch's")


def _cpp_words(
    root: Path, homes: tuple[str, ...], names: re.Pattern[str], headers: re.Pattern[str], what: str
) -> list[str]:
    found = []
    for path, text in cpp_files(root):
        if path.startswith(homes):
            continue
        words = [name for _, name in includes_of(text) if headers.fullmatch(name)]
        words += names.findall(code_of(text))
        found += [f"csrc/{path}: {word} is {what}" for word in dict.fromkeys(words)]
    return found


def environment_is_read_in_config(root: Path) -> list[str]:
    readers = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for path, nodes in python_files(root):
        for node in nodes:
            imported = isinstance(node, ast.ImportFrom) and node.module == "os"
            names = {alias.name for alias in node.names} if imported else set()
            if _name(node).startswith("os."):
                names = {_name(node).removeprefix("os.")}
            found += [f"vramx/{path}: os.{name}" for name in names & readers if path != "config.py"]
    for path, text in cpp_files(root):
        found += [f"csrc/{path}: getenv" for _ in _CPP_ENVIRONMENT.findall(code_of(text))]
    return found


def _name(node: ast.AST) -> str:
    """Return a name, or an attribute of a name, as it is written; of other code nothing."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def kernels_need_torch_and_triton_only(root: Path) -> list[str]:
    accepted = {"torch", "triton", "vramx", *sys.stdlib_module_names}
    found = []
    for path, nodes in python_files(root):
        if path.startswith("kernels/"):
            tops = {name.split(".")[0] for name in imports_of(f"vramx/{path}", nodes)}
            found += [f"vramx/{path}: kernels import {top}" for top in sorted(tops - accepted)]
    return found


def imports_of(path: str, nodes: list[ast.AST]) -> set[str]:
    """Return the dotted name of everything that a module imports, relative imports resolved."""
    package = path.split("/")[:-1]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def parts_meet_in_api(root: Path) -> list[str]:
    found = []
    for path, nodes in python_files(root):
        part = path.split("/")[0].removesuffix(".py")
        if part not in PYTHON_PARTS:
            found.append(f"vramx/{path}: part {part!r} is in no table")
            continue
        accepted = {part, *PYTHON_PARTS[part]}
        for name in sorted(imports_of(f"vramx/{path}", nodes)):
            if (target := _part_named(name)) and target not in accepted:
                found.append(f"vramx/{path}: {part} imports {target}")
    return found


def _part_named(name: str) -> str | None:
    """Return the part of vramx that a dotted name lies in; a public name lies in __init__."""
    words = name.split(".")
    if words[0] != "vramx" or words[1:] == ["__version__"]:
        return None
    return words[1] if len(words) > 1 and words[1] in {*PYTHON_PARTS, "_core"} else "__init__"


def named_tuples_compile(root: Path) -> list[str]:
    """Up to torch 2.10 a property of a named tuple ends a compiled graph; a method does not."""
    found = []
    for path, nodes in python_files(root):
        tuples = [
            node
            for node in nodes
            if isinstance(node, ast.ClassDef) and "NamedTuple" in map(_name, node.bases)
        ]
        for node in (each for cls in tuples for each in cls.body if path.startswith("nn/")):
            if "property" in map(_name, getattr(node, "decorator_list", ())):
                found.append(f"vramx/{path}:{node.lineno}: a property of a named tuple")
    return found


def only_the_command_line_prints(root: Path) -> list[str]:
    found = []
    for path, nodes in python_files(root):
        if path.startswith("cli/") or path == "progress.py":  # bars, where there is a terminal
            continue
        for node in nodes:
            if isinstance(node, ast.Call) and _name(node.func) in {"print", "pprint"}:
                found.append(f"vramx/{path}:{node.lineno}: print")
            if isinstance(node, ast.Attribute) and _name(node) in {"sys.stdout", "sys.stderr"}:
                found.append(f"vramx/{path}:{node.lineno}: {_name(node)}")
    for path, text in cpp_files(root):
        found += [f"csrc/{path}: {word}" for word in _CPP_PRINT.findall(code_of(text))]
    return found


def the_map_names_every_file(root: Path) -> list[str]:
    """csrc/README.md has a line for each file; a header and its source share it."""
    text = (root / "csrc" / "README.md").read_text()
    named = set(re.findall(r"`([\w./]+)`", text))
    stems = {re.sub(r"\.(?:h|cpp)$", "", path) for path, _ in cpp_files(root)}
    known = {re.sub(r"\.(?:h|cpp)$", "", name) for name in named}
    missing = [f"csrc/{stem}: not in csrc/README.md" for stem in sorted(stems - known)]
    files = {name for name in known if re.fullmatch(rf"(?:{'|'.join(CPP_LAYERS)})/.+", name)}
    return missing + [f"csrc/README.md: {name} does not exist" for name in sorted(files - stems)]


def files_are_short(root: Path) -> list[str]:
    """A file of csrc is read at one sitting."""
    return [
        f"csrc/{path}: {lines} lines, of at most {MOST_LINES}"
        for path, text in cpp_files(root)
        if (lines := text.count("\n")) > MOST_LINES
    ]


def library_tests_run(root: Path) -> list[str]:
    """A file of tests that are skipped without a library is one of `make test-models`."""
    makefile = root / "Makefile"
    named = makefile.read_text() if makefile.exists() else ""
    return [
        f"tests/{path.name}: skipped without {match[1]}, and not in the Makefile"
        for path in sorted((root / "tests").glob("test_*.py"))
        if (match := _LIBRARY_TEST.search(path.read_text())) and path.name not in named
    ]


RULES: tuple[Callable[[Path], list[str]], ...] = (
    includes_go_down,
    core_stands_alone,
    cuda_stays_in_its_driver,
    torch_stays_in_the_shim,
    environment_is_read_in_config,
    kernels_need_torch_and_triton_only,
    parts_meet_in_api,
    named_tuples_compile,
    only_the_command_line_prints,
    the_map_names_every_file,
    files_are_short,
    library_tests_run,
)
