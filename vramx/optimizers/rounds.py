"""The states of one optimizer, and which of its parameters are stepped when.

A round is all steps of buckets up to the end of the optimizer's step, or its zero_grad(). What has
gradients is stepped in the order of the parameters; in backward, each bucket when it has all of
them, and the buckets that came next in the round before are fetched meanwhile. Of each device the
parameters have a stream (stream.py); those that have no link to a host are stepped as they are.
Not thread-safe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from vramx.compression.offload import offload
from vramx.errors import OffloadError, warn_once
from vramx.optimizers import separable, stepped
from vramx.optimizers.copies import HOLDER, ORIGINAL, parameters_of
from vramx.optimizers.options import Options, check_alone, check_one_device
from vramx.optimizers.states import Bucket
from vramx.optimizers.stream import StateStream
from vramx.sizes import format_size


class _Place(NamedTuple):
    stream: StateStream
    number: int  # of the bucket

    @property
    def bucket(self) -> Bucket:
        return self.stream.buckets[self.number]


class Rounds:
    """The streams of one optimizer."""

    def __init__(self, options: Options, step: Any = None) -> None:
        self.options = options
        self.step_before = step  # that the optimizer had of its own: a scheduler's counter
        self._streams: dict[torch.device, StateStream] = {}
        self._elsewhere: list[Tensor] = []
        self._places: dict[int, _Place] = {}  # of a parameter, by its id
        self._hooks: dict[int, Any] = {}  # of a parameter, by its id
        self._known: list[int] = []  # ids of the parameters, in the order of the groups
        self._numbers = separable.Numbers()  # of this round
        self._is_busy = False  # with a step, which reads states as they come
        self._round: list[_Place] = []  # what was stepped in this round already, in backward
        self._order: list[_Place] = []  # and in the one before

    def step(self, optimizer: Optimizer, run: Callable[[], None]) -> None:
        """Step what has gradients; `run` does that for those that have one then."""
        with self._working():
            self._step(optimizer, run)

    def _step(self, optimizer: Optimizer, run: Callable[[], None]) -> None:
        if not self._known:  # a copy, whose states are still where they were copied to
            self.adopt(optimizer, is_anywhere=True)
        self._unmark()
        self._learn(optimizer)
        parameters = parameters_of(optimizer)
        due = {id(p) for p in parameters if p.grad is not None}
        places = dict.fromkeys(self._places[p] for p in due if p in self._places)
        try:
            with separable.apart(optimizer, self._numbers) as run_some:
                if not due or any(id(p) in due for p in self._elsewhere):
                    run_some(self._elsewhere, run)
                for stream in self._streams.values():
                    wanted = sorted(place.number for place in places if place.stream is stream)
                    for i, number in enumerate(wanted):
                        stream.step(
                            number,
                            optimizer.state,
                            lambda bucket: run_some(bucket.parameters, run),
                            ahead=wanted[i + 1 :],
                        )
        finally:
            self.end_round()

    def step_in_backward(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Step the bucket of a parameter that has got its gradient, if it is the last one."""
        check_alone()
        place = self._places[id(parameter)]
        if place in self._round:
            raise OffloadError(stepped.TWICE)
        if torch._C._autograd._get_current_graph_task_keep_graph():
            warn_once(stepped.GRAPH_KEPT)
        if not self._round and self._order:
            place.stream.bring([each.number for each in self._order if each.stream is place.stream])
        if any(p.grad is None and p.requires_grad for p in place.bucket.parameters):
            return
        self._round.append(place)
        inner = separable.inner_step(getattr(optimizer, ORIGINAL))
        with self._working(), separable.apart(optimizer, self._numbers) as run_some:
            place.stream.step(
                place.number,
                optimizer.state,
                lambda bucket: run_some(bucket.parameters, lambda: inner(optimizer)),
                ahead=self._after(place),
            )
        for each in place.bucket.parameters:
            if each.grad is not None:
                stepped.mark(each)

    def discard(self, *, leaves_zeros: bool) -> None:
        """Do what zero_grad() means: gradients are thrown away, but those that were stepped."""
        if leaves_zeros and self._hooks:
            warn_once(stepped.NO_ZEROS, stacklevel=4)
        if self._round:
            warn_once(
                "zero_grad() came before step(), and parameters were stepped in backward already: "
                "a loss whose gradients are not meant for them has trained them. Where there are "
                "such losses, as of another model, use in_backward=False",
                stacklevel=4,
            )
        self.end_round()

    def end_round(self) -> None:
        self._unmark()
        self._numbers = separable.Numbers()
        if self._round:
            self._order, self._round = self._round, []
        for stream in self._streams.values():
            # Backward has them each time, so memory is saved by nothing in between. If they went
            # and came their places would depend on when a copy is over, and a program that fills
            # its limit would have its memory put together anew in each step.
            if self.options.in_backward:
                stream.turn_away()
            else:
                stream.close()

    def _unmark(self) -> None:
        for place in self._round:
            for parameter in place.bucket.parameters:
                stepped.unmark(parameter)

    def adopt(self, optimizer: Optimizer, *, is_anywhere: bool) -> None:
        """Put the states that are there where they wait, those that lie elsewhere too if so."""
        with self._working():
            self._learn(optimizer)
            for stream in self._streams.values():
                stream.adopt(optimizer.state, is_anywhere=is_anywhere)

    def keep(self, optimizer: Optimizer, nbytes: int) -> None:
        """Have so many bytes of states stay on each device from now on."""
        self.options = replace(self.options, keep_bytes=nbytes)
        for stream in self._streams.values():
            stream.keep(nbytes, optimizer.state)

    def buckets(self) -> list[list[Tensor]]:
        """Return the parameters whose states wait on the host, bucket by bucket."""
        return [b.parameters for stream in self._streams.values() for b in stream.buckets]

    def kept_of(self, sizes: Sequence[int]) -> int:
        """Return how many bytes stay if the states of all buckets were of these sizes."""
        left, kept = list(sizes), 0
        for stream in self._streams.values():
            own, left = left[: len(stream.buckets)], left[len(stream.buckets) :]
            sums = [total for total in accumulate(own) if total <= self.options.keep_bytes]
            kept += max(sums, default=0)
        return kept

    def has_states(self) -> bool:
        """Tell whether any states were put where they wait."""
        return any(stream.pinned_bytes or stream.kept_bytes for stream in self._streams.values())

    @contextmanager
    def without_steps(self, optimizer: Optimizer) -> Iterator[None]:
        """Have gradients come without a step in backward."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, hooked = {}, bool(self._hooks)
        try:
            yield
        finally:
            if hooked:
                self._hook_all(optimizer, [p for bucket in self.buckets() for p in bucket])

    @contextmanager
    def _working(self) -> Iterator[None]:
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    def settle_between_steps(self) -> None:
        if not self._is_busy:
            self.settle()
            for stream in self._streams.values():
                stream.turn_away()  # whoever reads the states may change them

    def settle(self) -> None:
        for stream in self._streams.values():
            stream.settle()

    def undo(self) -> None:
        for stream in self._streams.values():
            stream.undo()  # for which there may be no room: then all goes on as before
        self._unmark()
        for hook in self._hooks.values():
            hook.remove()

    def __str__(self) -> str:
        pinned = sum(stream.pinned_bytes for stream in self._streams.values())
        slots = sum(stream.device_bytes for stream in self._streams.values())
        kept = sum(stream.kept_bytes for stream in self._streams.values())
        stay = f"{format_size(kept)} on a GPU, " if kept else ""
        when = "while training" if self.options.in_backward else "during a step"
        return f"{format_size(pinned)} on the host, {stay}{format_size(slots)} more {when}"

    def _after(self, place: _Place) -> list[int]:
        """Return what came after a bucket in the round before, on the same device."""
        if place not in self._order:
            return []
        later = self._order[self._order.index(place) + 1 :]
        return [each.number for each in later if each.stream is place.stream]

    def _learn(self, optimizer: Optimizer) -> None:
        """Give new parameters a bucket, and let go of those that others have replaced.

        A parameter that is in no group any more keeps its place as long as it has states.
        """
        every = parameters_of(optimizer)
        ids = list(map(id, every))
        if ids == self._known:
            return
        is_first, self._known = not self._known, ids
        gone = {p for p in self._all() if id(p) not in ids and p not in optimizer.state}
        held = set(map(id, self._all()))
        new = [p for p in every if id(p) not in held]
        if new and self.options.in_backward:
            check_one_device(every)
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in new:
            by_device.setdefault(parameter.device, []).append(parameter)
        for device, parameters in by_device.items():
            link = offload.link_of(device)
            if link is None:
                self._elsewhere += parameters
                continue
            stream = self._streams.get(device)
            if stream is None:
                sizes = self.options.sizes(parameters)
                stream = self._streams[device] = StateStream(device, link, *sizes)
            for number in stream.add(parameters):
                if not is_first:  # whose states may come from those of another
                    stream.adopt_one(number, optimizer.state)
                place = _Place(stream, number)
                self._places.update((id(p), place) for p in place.bucket.parameters)
            if self.options.in_backward:
                self._hook_all(optimizer, parameters)
        self._forget(gone)  # only now: what others have as states may be views of theirs

    def _hook_all(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self._hooks |= {id(p): _hook(optimizer, p) for p in parameters if p.requires_grad}

    def _all(self) -> list[Tensor]:
        return [*self._elsewhere, *(p for bucket in self.buckets() for p in bucket)]

    def _forget(self, gone: set[Tensor]) -> None:
        if gone:
            self._elsewhere = [p for p in self._elsewhere if p not in gone]
            for stream in self._streams.values():
                stream.remove(gone)
            for parameter in gone:
                self._places.pop(id(parameter), None)
                if id(parameter) in self._hooks:
                    self._hooks.pop(id(parameter)).remove()


def _hook(optimizer: Optimizer, parameter: Tensor) -> Any:
    # A parameter that refers to its optimizer would keep both alive.
    reference = weakref.ref(optimizer)

    def hook(parameter: Tensor) -> None:
        optimizer = reference()
        if optimizer is not None:
            vars(optimizer)[HOLDER].step_in_backward(optimizer, parameter)

    return parameter.register_post_accumulate_grad_hook(hook)
