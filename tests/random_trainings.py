"""Trainings of transformers that nobody wrote: drawn sizes, lengths, checkpoints and evaluations.

Sizes are drawn as models have them and not as an allocator likes them. The blocks of a step live as
those of a training do: parameters stay, a layer's residuals wait for its backward, the first step
makes gradients and Adam's states, and gradients are kept or made anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from samples import Recorder

MIB = 1 << 20


class RandomTraining:
    """Draws a model, its data and how it is trained from a seed, and records it."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.recorder = Recorder()
        self.hidden = int(random.choice([384, 640, 768, 896, 1024, 1280, 1536, 2048]))
        self.layers = int(random.integers(6, 24))
        self.element_bytes = int(random.choice([2, 4]))
        self.widening = float(random.choice([2.67, 3.5, 4]))
        self.vocabulary = int(random.choice([8000, 32000, 50257]))
        self.is_checkpointed = random.random() < 0.3
        self.keeps_scores = random.random() < 0.3
        self.varies = random.random() < 0.8
        self.longest = int(random.choice([1024, 2048, 4096]))
        square = self.hidden**2 * self.element_bytes
        wide = int(self.hidden**2 * self.widening) * self.element_bytes
        vector = self.hidden * self.element_bytes
        self.layer = [square] * int(random.integers(2, 5)) + [wide] * 2 + [vector] * 3
        self.sizes = [self.vocabulary * vector, *self.layer * self.layers]
        self.gradients: list[int] = []

    def arrays(self) -> dict[str, Any]:
        """Return the trace of some steps, with an evaluation now and then."""
        for size in self.sizes:
            self.recorder.allocate(size)
        for step in range(int(self.random.integers(6, 12))):
            tokens = int(self.longest * (self.random.uniform(0.3, 1.5) if self.varies else 1))
            self.step(tokens, is_first=step == 0)
            self.recorder.allocate(int(self.random.integers(4, 4000)))  # what is logged
            if step % 4 == 3:
                self.evaluate(int(tokens * self.random.uniform(0.2, 3)))
        return self.recorder.arrays()

    def step(self, tokens: int, *, is_first: bool) -> None:
        residuals = []
        for _ in range(self.layers):
            layer = self.forward_layer(tokens)
            if self.is_checkpointed:
                self.free(layer[1:])
            residuals.append(layer[:1] if self.is_checkpointed else layer)
        logits_bytes = tokens * self.vocabulary * 4
        self.free([self.recorder.allocate(logits_bytes) for _ in range(2)])
        is_new = not self.gradients
        for layer in reversed(residuals):
            self.backward_layer(tokens, layer)
            if is_new:
                self.gradients += map(self.recorder.allocate, self.layer)
        if is_new:
            self.gradients.append(self.recorder.allocate(self.sizes[0]))
        if is_first:  # Adam's states
            for size in self.sizes * 2:
                self.recorder.allocate(size)
        if self.random.random() < 0.5:
            self.free(self.gradients)
            self.gradients = []

    def backward_layer(self, tokens: int, residuals: list[int]) -> None:
        if self.is_checkpointed:
            again = self.forward_layer(tokens)
            self.free(again[:1])
            residuals = residuals + again[1:]
        for block in residuals:
            self.free([block, self.recorder.allocate(tokens * self.hidden * self.element_bytes)])

    def forward_layer(self, tokens: int) -> list[int]:
        """Return a layer's residuals, the first of which is its input."""
        narrow = tokens * self.hidden * self.element_bytes
        wide = int(narrow * self.widening)
        kept = [self.recorder.allocate(narrow) for _ in range(4)]
        scores = min(tokens**2 * self.element_bytes * 2, 600 * MIB)
        passing = [self.recorder.allocate(scores if self.keeps_scores else narrow)]
        kept += [self.recorder.allocate(wide) for _ in range(2)]
        self.free([*passing, self.recorder.allocate(wide)])
        return kept

    def evaluate(self, tokens: int) -> None:
        narrow = tokens * self.hidden * self.element_bytes
        last = self.recorder.allocate(narrow)
        for _ in range(self.layers):
            result = self.recorder.allocate(narrow)
            self.free([last, self.recorder.allocate(int(narrow * self.widening))])
            last = result
        self.free([last, self.recorder.allocate(tokens * self.vocabulary * self.element_bytes)])

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.recorder.free(block)
