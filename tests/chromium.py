"""The system's Chromium, driven over the pipe of its DevTools protocol: no library, no network.

A browser is a process with a profile of its own; messages are JSON with a null byte after each.
Everything that the page logs, raises or asks the network for is collected.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-extensions"),
    *("--remote-debugging-pipe", "--window-size=1400,1600"),
)
LIMIT_S = 60.0
_LOCAL = ("file:", "data:", "blob:", "about:")


@functools.cache
def executable() -> str | None:
    """Return the browser of this machine, if it has one that starts."""
    return next((found for name in NAMES if (found := shutil.which(name)) and _starts(found)), None)


def _starts(program: str) -> bool:
    # Some distributions have a script of the name that only says where to get one.
    command = [program, "--version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Page:
    """The page that a browser shows; another file is another page.

    complaints: errors of the console and exceptions, as text.
    requests: what was asked of the network, by address.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._target: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(self, path: Path) -> None:
        """Load a file without a network and wait until it is there."""
        self._session = None
        if self._target is not None:
            self._call("Target.closeTarget", targetId=self._target)
        self.complaints, self.requests = [], []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self._call("Network.emulateNetworkConditions", **offline)
        self._call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        end_s = time.monotonic() + LIMIT_S
        while not self.evaluate(condition):
            assert time.monotonic() < end_s, f"it never became true: {condition}"
            time.sleep(0.05)

    def click(self, element: str) -> None:
        """Click with the mouse into the middle of what an expression gives."""
        x, y = self.evaluate(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2];"
            "})()"
        )
        for kind, buttons in (("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 0)):
            button = "none" if kind == "mouseMoved" else "left"
            where = {"x": x, "y": y, "button": button, "buttons": buttons, "clickCount": 1}
            self._call("Input.dispatchMouseEvent", type=kind, **where)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], LIMIT_S)
            assert ready, "the browser says nothing"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            said = details.get("exception", {}).get("description", "")
            self.complaints.append(f"{details['text']} {said}"[:500])
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(parameters["args"])[:500])
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(parameters["entry"])[:500])
        elif event == "Network.requestWillBeSent":
            address = parameters["request"]["url"]
            if not address.startswith(_LOCAL):
                self.requests.append(address)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Start a browser for a while."""
    program = executable()
    assert program is not None
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    # The browser has them at 3 and 4; above those neither overwrites the other.
    ends = [fcntl.fcntl(each, fcntl.F_DUPFD, 20) for each in (read_there, write_there)]
    start = f"import os, sys; os.dup2({ends[0]}, 3); os.dup2({ends[1]}, 4)"
    start += "; os.execv(sys.argv[1], sys.argv[1:])"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", start, *command],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for each in (read_there, write_there, *ends):
            os.close(each)
        try:
            yield Page(write_here, read_here)
        finally:
            process.kill()
            process.wait()
            os.close(read_here)
            os.close(write_here)
