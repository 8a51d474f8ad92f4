"""The processes that train together, while each looks for what all of them can take.

They take the same steps in the same order: what each decides is agreed on, from what all of them
have, in a gloo group of its own, so that nothing waits for a GPU. A process that runs out of
memory within a step, which others may be in with a collective, says so in the store; the others
watch the store from a thread, end the step's group, and all of them raise. NCCL's groups can be
ended so; those of gloo end by the timeout that they were made with. Without
torch.distributed there is one process, and all of this does nothing. One search at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from vramx.errors import VramxError

Value = TypeVar("Value")

_POLL_S = 0.1
_GRACE_S = 5.0  # for what has no collective ahead, and ends by itself
# How often an attempt was made in this process: each has its own keys in the store.
_attempts = 0


class FailedTogetherError(VramxError, RuntimeError):
    """A process failed in a step that others had begun; their group is at an end."""


class Ranks:
    """What the processes of a training agree on.

    Args:
        timeout_s: how long one waits for the others.
        caller: what all of them call; remedy: what may help where one runs out of memory.
    """

    def __init__(
        self, timeout_s: float, caller: str = "fit_batch", remedy: str = "a smaller max"
    ) -> None:
        self._caller, self._remedy = caller, remedy
        self._timeout = timedelta(seconds=timeout_s)
        self._together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group: Any = None
        if self._together:
            try:
                self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            except RuntimeError as error:
                raise self._alone(error) from None

    @property
    def count(self) -> int:
        """How many processes train together."""
        return dist.get_world_size() if self._together else 1

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None:
            with contextlib.suppress(Exception):  # where the processes were torn apart
                dist.destroy_process_group(self._group)

    def gathered(self, value: Value) -> list[Value]:
        """Return what each process gives.

        Raises:
            VramxError: a process did not answer in time.
        """
        found = [value] * self.count
        try:
            if self._together:
                dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            raise self._alone(error) from None
        return found

    def _alone(self, error: RuntimeError) -> VramxError:
        return VramxError(
            f"another process did not answer within {self._timeout.total_seconds():.0f} s: "
            f"all of them call {self._caller}, with the same arguments "
            f"({str(error).splitlines()[0]})"
        )

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[_Attempt]:
        """Run what is within in step with the others.

        Raises:
            FailedTogetherError: another process failed where this one could not go on.
        """
        if not self._together:
            yield _Attempt(None, "")
            return
        global _attempts  # noqa: PLW0603 - as of the store, there is one a process
        _attempts += 1
        store = dist.distributed_c10d._get_default_store()
        attempt = _Attempt(store, f"vramx/{self._caller}/{_attempts}")
        watcher = threading.Thread(target=attempt.watch, daemon=True)
        watcher.start()
        error: Exception | None = None
        try:
            yield attempt
        except Exception as raised:
            attempt.fail()
            error = raised
        finally:
            attempt.done.set()
            watcher.join()
        if attempt.aborted:  # a GPU's collective that is ended may raise nothing
            raise FailedTogetherError(
                f"another process failed {what}, which this one had begun, too; their process "
                f"group was ended: start again, with {self._remedy} if it was out of memory"
            ) from error
        if error is not None:
            raise error


class _Attempt:
    """One step that all processes take; `aborted` where the group was ended for another one."""

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self.done = threading.Event()
        self.aborted = False

    def fail(self) -> None:
        """Say that this process failed."""
        if self._store is not None:
            self._store.set(self._key, b"failed")

    def watch(self) -> None:
        """End the group where another process failed and this one stays in its step."""
        while not self.done.wait(_POLL_S):
            if not self._store.check([self._key]):
                continue
            # A step without a collective ahead goes on to its end.
            if self.done.wait(_GRACE_S):
                return
            self.aborted = True
            dist.distributed_c10d._abort_process_group()
            return
