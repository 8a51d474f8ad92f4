"""Runs tests of the shim in processes of their own, because a process installs it once.

The processes are forked from one that has imported what they need and installed nothing: a fork
takes a tenth of the time that a start of Python takes with these imports.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from tempfile import TemporaryFile
from typing import Any

import pytest
from shim_build import ROOT, Bench, installed, libraries, missing, torch_folder

Test = Callable[..., None]

RUN_LIMIT_S = 120


def from_torch(minor: int) -> pytest.MarkDecorator:
    """Skip a test of what a torch before 2.`minor` has not."""
    old = torch_folder() is not None and int(version("torch").split(".")[1]) < minor
    return pytest.mark.skipif(old, reason=f"new in torch 2.{minor}")


def in_own_process(test: Test | None = None, **options: Any) -> Any:
    """Run a test of a Bench in a process of its own, with the shim installed as `options` say.

    Its first parameter is the bench, and others are pytest's to parametrize. A decorator, with
    options or without.
    """
    if test is None:
        return functools.partial(in_own_process, **options)
    return _running(test, options)


def before_installing(test: Test) -> Callable[..., None]:
    """Run a test as in_own_process() does, in a process that nothing was installed in."""
    return _running(test, None)


def _running(test: Test, options: dict[str, Any] | None) -> Callable[..., None]:
    def run(**arguments: Any) -> None:
        if lacking := missing():
            pytest.skip(f"cannot compile the shim: {lacking}")
        libraries()  # here, where compiling may take its time
        server = _fork_server()
        assert server.stdin is not None
        assert server.stdout is not None
        call = json.dumps([test.__module__, test.__name__, arguments])
        print(call, file=server.stdin, flush=True)
        code, said = json.loads(server.stdout.readline())
        assert code == 0, f"exit {code}\n{said}"

    def call(arguments: dict[str, Any]) -> None:
        bench = Bench()
        if options is not None:
            installed(bench, **options)
        test(bench, **arguments)

    functools.update_wrapper(run, test, assigned=("__module__", "__name__", "__doc__"))
    del run.__wrapped__  # type: ignore[attr-defined]
    # For pytest, which would look for a fixture of the name of the first.
    parameters = [*inspect.signature(test).parameters.values()][1:]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.call = call  # type: ignore[attr-defined]
    return run


@functools.cache
def _fork_server() -> subprocess.Popen[str]:
    """Start the process that tests are forked from; it ends with this one."""
    command = [sys.executable, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> None:
    """Fork for each test that a line of stdin names; answer with its exit code and its output."""
    importlib.import_module("vramx._core")
    for line in sys.stdin:
        module, name, arguments = json.loads(line)
        call = getattr(importlib.import_module(module), name).call
        with TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                signal.alarm(RUN_LIMIT_S)
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                call(arguments)
                return
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps([code, output.read()]), flush=True)


def on_another_thread(action: Callable[[], object]) -> None:
    """Run the action there, to its end."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


if __name__ == "__main__":
    sys.path.append(str(ROOT))  # where vramx is not installed
    serve()
