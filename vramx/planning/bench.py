"""Measuring a model under its words, whole and block by block.

Measured are a step of the model as it is, where that fits; one with every block at the word that
needs least; and by itself one block of each kind under each word. So a model can be planned that
does not fit as it is. Words that recompute are not for blocks that do not do the same again.
Processes that train together do all of it in step, and agree on each number. Not thread-safe;
measuring costs some tens of passes a kind and word.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from vramx.errors import InvalidValueError, RecomputationError
from vramx.planning.agreement import Agreement
from vramx.planning.assembly import assemble
from vramx.planning.blocks import Block
from vramx.planning.budget import device_of
from vramx.planning.device_memory import is_out_of_memory
from vramx.planning.isolated import busy_without_block, free_garbage, measure_block
from vramx.planning.loop import Loop
from vramx.planning.measured import Before, Measured
from vramx.planning.meters import meter_of
from vramx.planning.repeats import left_out, why_not_repeated, without_recomputation
from vramx.planning.running import Runner
from vramx.planning.states import tensors_of
from vramx.planning.steps import Step, check_sample, reached_by_step, unchanged
from vramx.planning.timeline import Cost, Timeline
from vramx.planning.trace import Captured, Trace, trace_step
from vramx.planning.weights_kept import KeptWeights
from vramx.planning.words import WORDS, apply_words, cheapest, recomputes
from vramx.progress import ProgressBar


class Bench(Runner):
    """A step of a model in its loop, and what measures it, whole and block by block."""

    def measure(
        self, words: Mapping[Block, Sequence[str]], before: Before | None = None
    ) -> Measured:
        """Return what is known of a model whose blocks can have these words.

        Args:
            before: what a step of the model as it is takes, where that is known.
        """
        blocks = list(words)
        if before is None:
            with self._agreement.phase("in a step of the model as it is"):
                self._bar.show("plan: the model as it is", 0, 1)
                before = self._before()
            before = self._agreed(before)
        with self._agreement.phase("looking for what repeats"):
            reasons = self._why_not_recomputed(words)
        seen = self._agreement.any_of([block in reasons for block in blocks])
        for block in (block for block, flag in zip(blocks, seen, strict=True) if flag):
            reasons.setdefault(block, "another process saw that it does not do the same again")
        kept, dropped = without_recomputation(words, reasons)
        with self._agreement.phase("measuring blocks"):
            timeline = self._timeline(kept, dropped)
        with self._agreement.phase("agreeing on what was measured"):
            timeline = self._agreement.timeline(timeline, WORDS)
        return Measured(self._model, blocks, timeline, self._meter.spread, before, dropped)

    def _before(self) -> Before:
        if self._agreement.is_shared:  # out of memory would leave other processes waiting
            return Before(None, 0.0, "not run, as its processes wait for each other")
        try:
            peak = self._peak_bytes()
            found = Before(peak, self._meter.time_ms(self._step))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = Before(None, 0.0, "out of memory")
        free_garbage()  # what it had is more than what follows needs
        return found

    def _agreed(self, before: Before) -> Before:
        failed = self._agreement.most(before.peak_bytes is None)
        peak, step_ms = map(self._agreement.most, (before.peak_bytes or 0, before.step_ms))
        if failed:
            return Before(None, 0.0, before.reason or "out of memory in another process")
        return Before(int(peak), step_ms)

    def _why_not_recomputed(self, words: Mapping[Block, Sequence[str]]) -> dict[Block, str]:
        """Return why blocks cannot be recomputed; the model keeps least meanwhile."""
        asked = [block for block, found in words.items() if any(map(recomputes, found))]
        if not asked:
            return {}
        base = {block: cheapest(words[block]) for block in words}
        with apply_words(self._model, base), self._meter.watching():
            return why_not_repeated(self._step.forward, asked)

    def _timeline(self, words: Mapping[Block, Sequence[str]], dropped: list[str]) -> Timeline:
        blocks = list(words)
        base = {block: cheapest(words[block]) for block in blocks}
        with apply_words(self._model, base):
            self._bar.show("plan: a step that keeps least", 0, 1)
            trace, captured, step_ms = self._trace(blocks)
        kinds = {}
        for number, (kind, call) in enumerate(captured.items()):
            self._bar.show("plan: measuring blocks", number, len(captured))
            first = base[call.block]
            ordered = sorted(words[call.block], key=lambda w: w != first)
            kinds[kind] = self._costs(call, ordered, dropped)
        costs = [kinds[call.kind] for call in trace.calls]
        base_words = [base[blocks[call.block]] for call in trace.calls]
        timeline = assemble(trace, costs, base_words, step_ms)
        # The optimizers' step: all gradients are there, and nothing of any call.
        optimizing = trace.marks[-1].level + self.loop.step_bytes
        before = max(timeline.gaps[0], optimizing)
        return replace(timeline, gaps=(before, *timeline.gaps[1:]))

    def _trace(self, blocks: Sequence[Block]) -> tuple[Trace, dict[Any, Captured], float]:
        with self._meter.watching():
            self._step()
            self._meter.settle()
            trace = trace_step(self._step, blocks, self._meter, capture=False)
        step_ms = self._meter.time_ms(self._step)
        # Last: what it keeps would count in what is measured.
        again = trace_step(self._step, blocks, self._meter, capture=True)
        self._step.let_go()
        if [call.block for call in again.calls] != [call.block for call in trace.calls]:
            raise InvalidValueError(
                f"{type(self._model).__name__} calls other blocks in one step than in the next, as "
                "where layers are dropped at random: no step tells what another one takes; plan "
                "with the dropping off, and what is planned has room for steps with it"
            )
        for call, same in zip(trace.calls, again.calls, strict=True):
            # A module may describe itself by what it has counted, and steps differ in size.
            call.kind = same.kind
        return trace, again.captured, step_ms

    def _costs(
        self, captured: Captured, words: Sequence[str], dropped: list[str]
    ) -> dict[str, Cost]:
        """Return the costs of a call under each word that there is enough memory for."""
        found: dict[str, Cost] = {}
        beside = busy_without_block(captured, self._meter, self.loop.begin)
        for word in words:
            try:
                with apply_words(self._model, {captured.block: word}):
                    cost = measure_block(captured, self._meter, beside, self.loop.begin)
            except (CheckpointError, RecomputationError) as error:
                if word == words[0]:
                    raise
                dropped.append(left_out([word], captured.block, str(error).splitlines()[0]))
                continue
            if cost is not None:
                found[word] = cost
            elif not found:
                raise InvalidValueError(
                    f"{captured.block.name} alone is too much for the device under {word!r}"
                )
            elif self._agreement.is_shared:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. {captured.block.name} alone is too much for the device "
                    f"under {word!r}, in a call that other processes take part in"
                )
        return found


@contextmanager
def ready(model: nn.Module, sample: Any, loop: Loop, agreement: Agreement) -> Iterator[Bench]:
    """Have a model and its loop ready to be measured; put all back on leaving.

    Raises:
        InvalidValueError: the model cannot be measured, or a block cannot be recomputed.
    """
    check_sample(model, sample)
    device = device_of(model)
    gc.collect()  # what nothing refers to would count as the model's, until some step frees it
    modules = reached_by_step(model, sample)
    kept = KeptWeights(modules)
    with (
        loop.without_steps(),
        unchanged(model, sample, modules, loop) as trained,
        ExitStack() as stack,
    ):
        stack.callback(kept.put_back)
        begin, before = partial(loop.begin_step, trained), partial(loop.before_backward, trained)
        step = Step(model, sample, begin, before, kept.watching())
        states = [tensor for each in loop.optimizers for tensor in tensors_of(each.state)]
        meter = meter_of(device, model, states)
        try:
            with loop.measured(trained, meter, device) as measured, ProgressBar() as bar:
                yield Bench(step, meter, measured, agreement, bar)
        except (CheckpointError, RecomputationError) as error:
            raise InvalidValueError(
                f"a block of {type(model).__name__} does not do again what it did when it is "
                "recomputed; plan with levels that recompute nothing, such as "
                f"levels=('left', 'int8'): {str(error).splitlines()[0]}"
            ) from error
        finally:
            meter.settle()  # nothing of the last step stays on the device
