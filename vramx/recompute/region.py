"""The function of a checkpoint as torch calls it: first in forward, then to recompute.

In forward it gets the caller's arguments, in a recomputation new containers around decoded tensors,
and what it reaches as it was before the call: objects, its own variables, what its modules are made
of and have in their attributes, generators of random numbers. The first call of a kind is watched
(watch.py): what ran decides how the inputs are kept. A recomputation from packed inputs is watched
too, for it may take a way that the watched call did not take.

A recomputation's graph goes with it. A hook or a list that it reaches may hold a part of it all the
same, and regions within have what they are of in that graph, where the collector cannot look: such
a ring would stay for ever. So they forget it when the recomputation is over.

One thread at a time. Nothing here holds a tensor of the region once it has run, but for those of
its modules.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vramx.compression.fakes import PLAIN, is_labelled
from vramx.errors import RecomputationError, warn_once
from vramx.recompute import verdicts
from vramx.recompute.ending import Ending
from vramx.recompute.inputs import Inputs
from vramx.recompute.objects import Before, as_before
from vramx.recompute.origins import Origins
from vramx.recompute.stand_ins import is_small_constant
from vramx.recompute.structure import Structure
from vramx.recompute.surroundings import Surroundings
from vramx.recompute.unfilled import saved_behind
from vramx.recompute.verdicts import Verdict
from vramx.recompute.watch import Operators, Reads, Watch
from vramx.recompute.way import Steps


class Region:
    """One call of a function.

    `verdict` is known once it has run. It names nothing if no input is to be packed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        structure: Structure,
        arguments: tuple[Any, Any],
        inputs: Inputs | None,
        *,
        vouched: bool = False,
        preserve_rng_state: bool = True,
    ) -> None:
        self.verdict = Verdict("")
        self._function = function
        self._structure = structure
        self._arguments: tuple[Any, Any] | None = arguments
        self._inputs = inputs
        self._allowed: frozenset[str] = frozenset()
        self._vouched = vouched
        # What is vouched for draws by torch alone.
        self._draws_again = preserve_rng_state and not vouched
        self._is_watched = False
        self._was_seen = False
        self._steps = Steps()
        self._ran_in_mode = False
        self._was_read: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._key: Hashable | None = None
        # What the program has put on tensors among the leaves, and classes of its own that they are
        # of, by number: packed or detached they lose both.
        self._notes: dict[int, dict[str, Any]] = {}
        self._classes: dict[int, type[Tensor]] = {}
        self._then: Surroundings | None = None
        self._is_over = False
        if (within := getattr(_recomputing, "regions", None)) is not None:
            within.append(weakref.ref(self))

    @property
    def name(self) -> str:
        """How it is named to its user."""
        return verdicts.name_of(self._function)

    def leaves_of(self, leaves: list[Any]) -> list[Any]:
        """Return the leaves for torch to keep: objects as they are now."""
        self._notes = {i: dict(vars(leaf)) for i, leaf in enumerate(leaves) if _has_notes(leaf)}
        self._classes = {i: type(leaf) for i, leaf in enumerate(leaves) if _is_labelled(leaf)}
        return list(map(as_before, leaves))

    def __call__(self, *leaves: Any) -> Any:
        # TorchScript saves other tensors from a function's second run on, once it has profiled the
        # first. Not optimized, it saves what it runs.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            if self._is_over:
                raise RecomputationError(
                    "a gradient was asked of what a checkpoint's recomputation had made, after "
                    "that recomputation; take it within the region, or leave that module out"
                )
            if self._arguments is None:
                with _forgotten_within():
                    return self._recompute(leaves)
            (args, kwargs), self._arguments = self._arguments, None
            try:
                return self._run(args, kwargs, leaves)
            except BaseException:
                self._give_up(leaves)
                raise

    def _give_up(self, leaves: tuple[Any, ...]) -> None:
        """Let go of what the run that failed has changed, such as a list that has a part of it.

        That part's graph leads here: kept, none of it would ever be freed.
        """
        for leaf in leaves:
            if isinstance(leaf, Before):
                leaf.give_up()
        if self._then is not None:
            self._then.settle()

    def _run(self, args: Any, kwargs: Any, leaves: tuple[Any, ...]) -> Any:
        inputs, self._inputs = self._inputs, None
        function, draws_again = self._function, self._draws_again
        self._then = then = Surroundings(function, leaves, (args, kwargs), draws_again=draws_again)
        buffers = then.buffers
        if inputs is not None and inputs.may_pack and not self._vouched:
            self._allowed = inputs.allowed
            result = self._run_to_pack(args, kwargs, leaves, (inputs.tensors, then))
        elif then.are_new:
            self._ran_in_mode = True
            with Operators(_accept, self._allowed, buffers=buffers), _steps_told():
                result = self._function(*args, **kwargs)
        else:
            result = self._function(*args, **kwargs)
        result = saved_behind(result)
        then.settle()
        for leaf in leaves:
            if isinstance(leaf, Before):
                leaf.check()
        return result

    def _run_to_pack(
        self,
        args: Any,
        kwargs: Any,
        leaves: tuple[Any, ...],
        seen: tuple[list[Tensor], Surroundings],
    ) -> Any:
        tensors, then = seen
        key = verdicts.key_of(self._function, leaves, self._allowed)
        self._key = None if key is None else (key, self._structure.order)
        verdict = verdicts.known(self._key)
        if verdict is None or then.are_new:
            self._ran_in_mode = True
            self._was_read = Reads(_accept)
            watch = Watch(self._allowed, tensors, then.buffers, leaves)
            with self._steps.noted(), watch.running(), _steps_told():
                result = self._function(*args, **kwargs)
            watch.look_at(result, leaves)
            verdict = watch.verdict
            self._was_seen = True
            if verdict.rough:
                verdicts.remember(self._key, self._function, verdict)
        elif verdict.rough:
            result = self._function(*args, **kwargs)
        else:
            with self._steps.noted():
                result = self._function(*args, **kwargs)
        self.verdict = verdict
        self._is_watched = not verdict.rough
        return result

    def judged(self) -> Verdict:
        """Return how the inputs are kept, now that the call has run, and where it saved."""
        way = self._steps.way()  # which the graph is not to hold
        if self._key is not None and self._is_watched:
            seen = self.verdict if self._was_seen else None
            self.verdict = verdicts.of_way(self._key, self._function, way, seen)
            self._is_watched = not self.verdict.rough
        return self.verdict

    def _recompute(self, leaves: tuple[Any, ...]) -> Any:
        found = [leaf.again() if isinstance(leaf, Before) else _apart(leaf) for leaf in leaves]
        for i, label in self._classes.items():
            if type(found[i]) is not label:
                found[i] = found[i].as_subclass(label)
        for i, notes in self._notes.items():
            if not vars(found[i]):
                vars(found[i]).update(notes)
        args, kwargs = self._structure.rebuild(found)
        assert self._then is not None
        with self._then.restored((args, kwargs)) as function, Ending():
            if not self._is_watched and not self._ran_in_mode:
                return saved_behind(function(*args, **kwargs))
            # Some of torch's functions, such as ctc_loss, save other tensors in a mode, and
            # torch.compile makes other graphs.
            on_rough = self._refuse if self._is_watched else _accept
            origins = Origins(leaves) if self.verdict.excused else None
            with self._was_read, Operators(on_rough, self._allowed, origins=origins):
                return saved_behind(function(*args, **kwargs))

    def _forget(self) -> None:
        self._is_over, self._function, self._notes = True, _accept, {}
        self._then, self._arguments, self._inputs = None, None, None

    def _refuse(self, rough: str) -> None:
        verdicts.remember(self._key, self._function, Verdict(rough))
        raise RecomputationError(
            f"{self.name} was recomputed from packed inputs and came to "
            f"{rough}, which is not known to be smooth; an earlier call of the same kind did not. "
            "From now on its inputs are kept exactly; level='keep' keeps them so from the start"
        )


_recomputing = threading.local()  # regions: those that the innermost recomputation has called


@contextlib.contextmanager
def _forgotten_within() -> Iterator[None]:
    """Have the regions that a recomputation calls forget what they are of once it is over."""
    outer = getattr(_recomputing, "regions", None)
    regions: list[weakref.ref[Region]] = []
    _recomputing.regions = regions
    try:
        yield
    finally:
        _recomputing.regions = outer
        for region in filter(None, (each() for each in regions)):
            region._forget()


@contextlib.contextmanager
def _steps_told() -> Iterator[None]:
    """Say once that a region steps an optimizer: it has the weights themselves, and no copies."""

    thread = threading.get_ident()

    def tell(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if threading.get_ident() != thread:
            return
        warn_once(
            f"{type(optimizer).__name__}.step() within a region under vramx.checkpoint is taken "
            "once more when the region is recomputed, with the gradients of then; take it "
            "outside of the region, or leave that module out",
            stacklevel=7,
        )

    handle = register_optimizer_step_pre_hook(tell)
    try:
        yield
    finally:
        handle.remove()


def _apart(leaf: Any) -> Any:
    """Return what a recomputation may write into in place of a small vector without a gradient.

    Statistics may be given as such, and the kernels of norms write them without a new version.
    """
    if type(leaf) is not Tensor or leaf.dim() != 1 or not leaf.is_floating_point():
        return leaf
    return leaf.clone() if is_small_constant(leaf) else leaf


def _has_notes(leaf: Any) -> bool:
    return (type(leaf) is Tensor or _is_labelled(leaf)) and bool(leaf.__dict__)


def _is_labelled(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and type(leaf) not in PLAIN and is_labelled(type(leaf))


def _accept(_rough: str) -> None:
    """Take any operation: what a region computes from exact inputs is what it was."""
