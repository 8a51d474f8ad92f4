"""`vramx demo`: two recorded runs under every policy, a picture, and what they show.

Needs no GPU and no file of the user's; half a minute. With a GPU the policy vramx also runs on it,
and the driver time measured there stands beside the modelled one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vramx.cli import common
from vramx.cli.plot import picture_format
from vramx.cli.replay import report_mismatches, summary, table
from vramx.errors import MissingDependencyError, VramxError
from vramx.progress import ProgressBar

if TYPE_CHECKING:
    from vramx.memory.replay import ReplayResult
    from vramx.memory.trace import Trace

PROGRAMS = {
    "llama_varlen.npz": "a 1.1 B Llama trained on sequences of 128 to 2048 tokens",
    "unet3d_patch.npz": "a 3-D U-Net trained on patches of random size",
}
DEFAULT_PICTURE = Path("vramx-demo.png")
_FOLDER = Path(__file__).resolve().parent.parent / "demo"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="two recorded runs under every policy, with a picture",
        description="Replay two recorded training runs under every allocation policy, say what "
        "they show, and draw the first.",
    )
    common.add_output_arguments(parser, f"the picture: .png or .html (default: {DEFAULT_PICTURE})")


def run(args: argparse.Namespace) -> int:
    """Replay the packaged traces, print, draw."""
    output = DEFAULT_PICTURE if args.output is None else args.output
    format_name = picture_format(output)
    common.check_output(output, args.force)
    with ProgressBar() as bar:
        traces = [common.read_trace(_FOLDER / name) for name in PROGRAMS]
        reports = [_replay(trace, bar) for trace in traces]
        measured = [_replay_on_gpu(trace, bar) for trace in traces] if gpu_usable() else []
        picture = _draw(traces[0], format_name, bar, required=args.output is not None)
    for index, results in enumerate(reports):
        on_gpu = measured[index] if measured else None
        common.print_parts(table(results), story(results, on_gpu), "")
    if picture is not None:
        common.write_output(output, picture, args.force)
        common.print_parts(f"The picture of {traces[0].name} is in {output}.")
    return report_mismatches("demo", [*reports, [result for result in measured if result]])


def gpu_usable() -> bool:
    """Say whether the first GPU supports the driver calls that vramx is built on."""
    from vramx.memory.replay import load_core

    devices = load_core().probe_cuda()["devices"]
    return bool(devices) and bool(devices[0]["vmm_supported"])


def story(results: list[ReplayResult], on_gpu: ReplayResult | None) -> str:
    """Say in words what a trace's table shows, and what the GPU did with it."""
    ours = next(result for result in results if result.policy == "vramx")
    text = f"This is {PROGRAMS[ours.trace]}. {summary(results)}"
    if on_gpu is None:
        return text
    if on_gpu.oom:
        return f"{text}\nThis GPU has too little free memory to replay it."
    return (
        f"{text}\nDriver calls of vramx: {ours.driver_us / 1e3:.1f} ms modelled, "
        f"{on_gpu.driver_us / 1e3:.1f} ms measured on this GPU."
    )


def _replay(trace: Trace, bar: ProgressBar) -> list[ReplayResult]:
    from vramx.memory import ReplayOptions, replay

    options = ReplayOptions(progress=bar.reporter(trace.name))
    return replay(trace, min_capacity=True, options=options)


def _replay_on_gpu(trace: Trace, bar: ProgressBar) -> ReplayResult | None:
    from vramx.memory import ReplayOptions, replay

    options = ReplayOptions(driver="cuda", progress=bar.reporter(f"{trace.name} on the GPU"))
    try:
        return replay(trace, "vramx", options=options)[0]
    except VramxError as error:  # the demo is about the simulated device; the GPU is an extra
        common.note("demo", f"{trace.name} did not run on the GPU: {error}")
        return None


def _draw(trace: Trace, format_name: str, bar: ProgressBar, required: bool) -> bytes | None:
    """Return the picture, or None where nobody asked for it and the library is missing."""
    from vramx.memory.plot import render, take_picture
    from vramx.memory.replay import ReplayOptions

    options = ReplayOptions(progress=bar.reporter(trace.name))
    try:
        return render(take_picture(trace, options=options), format_name)
    except MissingDependencyError as error:
        if required:
            raise
        common.note("demo", f"no picture is drawn: {error}")
        return None
