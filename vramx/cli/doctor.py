"""`vramx doctor`: what this machine has, and what of vramx will and will not work on it.

doctor_facts.py collects the facts, and this judges them: the judgement is a pure function of the
facts, so that every machine can be put before it in a test. Nothing here may fail for want of a
package, rich included: that is what it is asked about.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from vramx.cli import common
from vramx.cli.doctor_facts import NO_CORE, collect
from vramx.sizes import format_size

SCHEMA = 1
WORKS, LIMITED, MISSING = "works", "limited", "does not work"
OLDEST_CAPABILITY = 8.0  # for which the kernels of compression are compiled
OLDEST_TRITON = (3, 3)  # that compiles those of fused blocks
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One part of vramx on this machine: whether it works, and why not or with what limit."""

    part: str
    state: str
    reason: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has, and what will work on it",
        description="Say what this machine has and what of vramx will and will not work on it.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--require-gpu", action="store_true", help="exit with 1 when there is no usable GPU"
    )


def run(args: argparse.Namespace) -> int:
    facts = collect()
    findings = judge(facts)
    if args.json:
        document = {"schema": SCHEMA, "facts": facts, "findings": [asdict(f) for f in findings]}
        common.print_text(json.dumps(document, indent=2) + "\n")
    else:
        common.print_text("\n".join([*fact_lines(facts), "", *finding_lines(findings)]) + "\n")
    return int(args.require_gpu and not usable_gpus(facts))


def usable_gpus(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the devices that have virtual memory management, without which nothing is pooled."""
    return [device for device in facts["cuda"]["devices"] if device["vmm_supported"]]


def judge(facts: dict[str, Any]) -> list[Finding]:
    """Say for each part of vramx whether it will work, from the facts alone."""
    core = [NO_CORE] if facts["vramx"]["core_error"] else []
    pictures = [*core, *_lacks(facts, "matplotlib")]
    return [
        _finding("replay", [*core, *_lacks(facts, "numpy"), *_lacks(facts, "rich")], []),
        _finding("pictures", pictures, _lacks(facts, "plotly")),
        _finding("replay on a GPU", [*core, *_gpu_faults(facts)], _unsupported(facts)),
        _allocator_finding(facts, [*core, *_gpu_faults(facts)]),
        _finding("VRAMX=1 without vramx run", _without_entry_point(facts), []),
        _compression_finding(facts),
    ]


def _finding(part: str, faults: list[str], limits: list[str]) -> Finding:
    """The first fault decides; a part without one has all of its limits listed."""
    if faults:
        return Finding(part, MISSING, faults[0])
    return Finding(part, LIMITED if limits else WORKS, "; ".join(limits))


def _allocator_finding(facts: dict[str, Any], faults: list[str]) -> Finding:
    allocator = facts["allocator"]
    obstacles = [allocator["obstacle"]] if allocator["obstacle"] else []
    if allocator["shim_fault"]:
        limits = [f"only in plain mode, with strict=False: {allocator['shim_fault']}"]
        return _finding("install_allocator", [*obstacles, *faults], limits)
    found = _finding("install_allocator", [*obstacles, *faults], _unsupported(facts))
    if found.state != WORKS:
        return found
    shim = f"the shim for torch {allocator['shim_torch']}"
    first = "will be compiled at the first use, once"
    return Finding(found.part, WORKS, f"{shim} {'is built' if allocator['shim_built'] else first}")


def _compression_finding(facts: dict[str, Any]) -> Finding:
    torch, devices = facts["torch"], facts["cuda"]["devices"]
    limits = []
    if not devices or not torch["cuda"]:
        limits.append("only on the host, in plain torch: no GPU that torch can use")
    elif not facts["triton"]:
        limits.append("in plain torch, many times slower: triton is not installed")
    elif tuple(map(int, facts["triton"].split(".")[:2])) < OLDEST_TRITON:
        needed = ".".join(map(str, OLDEST_TRITON))
        limits.append(
            f"fused blocks in plain torch: triton is {facts['triton']}, they need {needed} or newer"
        )
    elif not facts["compiler"] or not facts["python_headers"]:
        lacking = "Python.h" if facts["compiler"] else "C++ compiler"
        limits.append(
            f"only with kernels in Triton's cache: no {lacking} for it to start others with "
            "(apt-get install g++ python3-dev, dnf install gcc-c++ python3-devel)"
        )
    old = [d for d in devices if float(d["compute_capability"]) < OLDEST_CAPABILITY]
    limits += [
        f"in plain torch on {d['name']}: its compute capability is {d['compute_capability']}, "
        f"the kernels need {OLDEST_CAPABILITY}"
        for d in old
    ]
    return _finding("compressed activations", [torch["error"]] if torch["error"] else [], limits)


def _without_entry_point(facts: dict[str, Any]) -> list[str]:
    if facts["allocator"]["entry_point"]:
        return []
    return ["vramx is not installed as a package, so torch does not find it: pip install it"]


def _lacks(facts: dict[str, Any], package: str) -> list[str]:
    if facts["packages"][package]:
        return []
    return [f"{package} is not installed: pip install {package}"]


def _gpu_faults(facts: dict[str, Any]) -> list[str]:
    cuda = facts["cuda"]
    if not cuda["devices"]:
        return [f"no GPU: {cuda['error'] or 'the driver reports no device'}"]
    if not usable_gpus(facts):
        return ["no GPU here has virtual memory management (under WSL or a vGPU it is off)"]
    return []


def _unsupported(facts: dict[str, Any]) -> list[str]:
    without = [d["name"] for d in facts["cuda"]["devices"] if not d["vmm_supported"]]
    return [f"not on {', '.join(without)}: no virtual memory management"] if without else []


def fact_lines(facts: dict[str, Any]) -> list[str]:
    """Write the facts for people, one a line."""
    torch, cuda = facts["torch"], facts["cuda"]
    built = f"CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
    packages = ", ".join(f"{name} {v}" for name, v in facts["packages"].items() if v)
    rows = {
        "vramx": f"{facts['vramx']['version']}, core: {facts['vramx']['core_error'] or 'loaded'}",
        "Python": f"{facts['python']} on {facts['system']}",
        "torch": torch["error"] or f"{torch['version']}, built {built}",
        "triton": facts["triton"] or "not installed",
        "compiler": facts["compiler"] or "none found",
        "packages": packages or "none",
        "CUDA driver": _driver(cuda),
        **{f"GPU {n}": _device(device) for n, device in enumerate(cuda["devices"])},
    }
    return [_labelled(name, text, 14) for name, text in rows.items()]


def _driver(cuda: dict[str, Any]) -> str:
    version = cuda["driver_version"]
    text = f"CUDA {version // 1000}.{version % 1000 // 10}" if version else "none"
    return f"{text} ({cuda['error']})" if cuda["error"] else text


def _device(device: dict[str, Any]) -> str:
    text = (
        f"{device['name']}, {format_size(device['total_bytes'])}, "
        f"compute capability {device['compute_capability']}"
    )
    if not device["vmm_supported"]:
        return f"{text}, without virtual memory management"
    ceiling_bytes = device["mapping_ceiling"] * device["granularity_bytes"]
    return (
        f"{text}, chunks of {format_size(device['granularity_bytes'], 0)}, "
        f"at most {device['mapping_ceiling']:,} mappings ({format_size(ceiling_bytes, 0)} at that "
        "size)"
    )


def finding_lines(findings: list[Finding]) -> list[str]:
    """Write the findings for people: the part, whether it works, and the reason."""
    said = ((each.part, each.state, each.reason and f": {each.reason}") for each in findings)
    return [_labelled(part, state + reason, 36) for part, state, reason in said]


def _labelled(label: str, text: str, width: int) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=f"{label:{width}}",
        subsequent_indent=" " * width,
        break_on_hyphens=False,
    )
