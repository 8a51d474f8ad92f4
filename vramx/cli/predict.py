"""`vramx predict`: the peak of a training step that is not run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vramx.cli import common
from vramx.errors import InvalidValueError, refused


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "predict",
        help="the peak of a training step before it runs, without a GPU",
        description="Predict what a training step takes, without a GPU and without its memory. The "
        "function takes no argument and is a step, or makes what is predicted, on tensors without "
        "data: it returns a step, or a tuple of a model, a sample and an optimizer.",
    )
    parser.add_argument(
        "target", metavar="TARGET", help="package.module:function or path/to/script.py:function"
    )
    parser.add_argument(
        "--levels",
        metavar="WORD[,WORD...]",
        help="words of vramx.plan to compare: left,keep,int8,int4,recompute_mlp,recompute_all "
        "(default: the step as it is)",
    )
    common.add_policy_argument(parser)
    common.add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    common.check_report(args)
    function = load(args.target)
    from vramx.planning.predict import predict_made

    levels = None if args.levels is None else [word.strip() for word in args.levels.split(",")]
    prediction = predict_made(function, levels=levels, policies=args.policy)
    common.put_out(args, (prediction.to_json() if args.json else str(prediction)) + "\n")
    return 0


def load(target: str) -> Callable[[], Any]:
    """Import a module or a script, and return a function of it.

    Raises:
        InvalidValueError: there is no such module, script or function, or importing it fails.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise refused("target", target, "are package.module:function and script.py:function")
    try:
        module = _script(Path(where)) if where.endswith(".py") else _module(where)
    except (Exception, SystemExit) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidValueError(f"{where} cannot be imported: {text}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidValueError(f"{where} has no function {name!r}")
    found: Callable[[], Any] = function
    return found


def _module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _script(path: Path) -> Any:
    """Import a script as a module of its stem's name: its main part does not run."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
