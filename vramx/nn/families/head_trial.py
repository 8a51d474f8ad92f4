"""Whether a language model's loss can be computed without logits: one like it is run both ways.

A class is known by what a small model of it does with the stand-in for logits: its loss and its
gradients are those with logits, and no logits were made. A small model has one layer; where such
cannot be made or called, the layers are left out (bare.py). Each class and config is tried once.
Changes no random state. Some hundredths of a second.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vramx.errors import summary
from vramx.nn.families.bare import bare_model, way_to_head
from vramx.nn.families.small import language_model, language_model_with_images, randomised
from vramx.nn.families.verify import difference_of, run
from vramx.nn.logits import Logits
from vramx.patch.module import original_class

# Of a model and its head: have its loss computed without logits.
Swap = Callable[[Any, nn.Module], None]
_LOGGER = "transformers"
_results: dict[Any, str | None] = {}


def why_not(model: Any, loss_of: Callable[[Any], Any], swap: Swap) -> str | None:
    """Return why a model of a class that is known makes logits; None: it need not."""
    try:
        classes = [original_class(part) for part in way_to_head(model)]
    except ValueError as error:
        return str(error)
    way = [(cls, cls.forward) for cls in classes]
    key = (*way, loss_of(model), repr(model.config))
    if key not in _results:
        _results[key] = _tried(model, loss_of, swap)
    return _results[key]


def _tried(model: Any, loss_of: Callable[[Any], Any], swap: Swap) -> str | None:
    """Try a small model of one layer; a bare one, or one that sees, where that cannot be called."""
    failed = ""
    for make in (language_model, bare_model, language_model_with_images):
        cpu = torch.device("cpu")
        as_usual = torch.autocast("cpu", enabled=False)
        with torch.random.fork_rng(devices=[]), cpu, as_usual, unlogged():
            try:
                small, call = make(model)
                trial = _Trial(randomised(small).eval(), call)
            except Exception as error:  # of a class that is made or called otherwise, say
                # The bare model has the model's own config, so that its reason says the most.
                failed = summary(error) if make is not language_model_with_images else failed
                continue
            if loss_of(small) is not loss_of(model):
                return "its loss_function was replaced"
            try:
                return trial.why_not(swap)
            except Exception as error:  # of one that reads the logits, say
                failed = summary(error)
                break
    return f"a small one of its class cannot be tried: {failed}"


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Let transformers say nothing of what is asked of it: the program has not asked."""
    logger = logging.getLogger(_LOGGER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Trial:
    """A small model's loss and gradients: with logits at first, then without."""

    def __init__(self, small: Any, call: dict[str, Any]) -> None:
        self._small, self._call = small, call
        small.training = True  # and no part of it: without dropout
        self._was_made = False
        self._expected = self._run()

    def why_not(self, swap: Swap) -> str | None:
        swap(self._small, self._small.get_output_embeddings())
        differs = difference_of(self._run(), self._expected)
        if differs is not None:
            return f"of a small one of its class, {differs}"
        return "its loss needs the logits themselves" if self._was_made else None

    def _run(self) -> Any:
        as_it_is = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.enable_grad(), as_it_is, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(self._loss, self._small, self._call)

    def _loss(self, **arguments: Any) -> Tensor:
        result = self._small(**arguments)
        by_name = isinstance(result, dict)
        logits = [x for x in (result.values() if by_name else result) if isinstance(x, Logits)]
        self._was_made = not logits or any(each.family_is_made for each in logits)
        loss: Tensor = result["loss"] if by_name else result[0]
        return loss
