"""One step of training on a sample, and the state that measuring must leave as it was.

A step is forward and backward, and before it gradients are as in the loop; no optimizer runs. Its
loss is the caller's if the sample is a function. What forward returned lives until the next one has
returned, as in a loop that keeps it in a variable. Not thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from vramx.compression.codec import random
from vramx.errors import InvalidValueError, brief
from vramx.planning.caches import Caches
from vramx.planning.lightning_step import check_lightning, is_lightning, training_step
from vramx.planning.loop import Loop
from vramx.planning.program import found_in
from vramx.planning.states_kept import generators_as_before, undo_of_gradient, undo_of_module
from vramx.recompute.attributes import attributes_as_now
from vramx.recompute.hooks import hooks_as_now
from vramx.recompute.reached import modules_of
from vramx.recompute.structure import leaves_of

_ACCEPTED = (
    "accepted are a tensor, a tuple of arguments, a mapping of keyword arguments, and a function "
    "of the model that returns the loss"
)


class Step:
    """Runs forward and backward of a model on a sample."""

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        begin: Callable[[], Any] = lambda: None,
        before_backward: Callable[[], Any] = lambda: None,
        first: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        check_sample(model, sample)
        self.model = model
        self._sample = sample
        self._begin = begin
        self._before_backward = before_backward
        self._first = first  # around the first step
        self._result: Any = None

    def __call__(self, between: Callable[[], Any] = lambda: None) -> None:
        """Run one step; `between` is called before backward, with the loss still alive."""
        around, self._first = self._first or contextlib.nullcontext(), None
        try:
            with around:
                self._run(between)
        except BaseException:
            self.let_go()  # of a graph that backward has not freed
            raise

    def let_go(self) -> None:
        """Let go of what the last forward pass returned."""
        self._result = None

    def _run(self, between: Callable[[], Any]) -> None:
        self._begin()
        try:
            result = self._result = self.forward()
        except StopIteration as error:
            raise InvalidValueError(
                "the batches that the step takes have come to an end: accepted is one batch as the "
                "sample, or a function whose batches go on"
            ) from error
        loss = result if callable(self._sample) else loss_of(result)
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise InvalidValueError(
                f"the step's loss is {_described(loss)}; accepted is a tensor of one element that "
                "requires grad"
            )
        between()
        self._before_backward()
        loss.backward()

    def forward(self) -> Any:
        """Run the forward pass alone; return what it returns."""
        sample = self._sample
        if is_lightning(self.model) and not callable(sample):
            return training_step(self.model, sample)
        if isinstance(sample, Tensor):
            return self.model(sample)
        if isinstance(sample, tuple):
            return self.model(*sample)
        return self.model(**sample) if isinstance(sample, Mapping) else sample(self.model)


def check_sample(model: nn.Module, sample: Any) -> None:
    """Raise unless a step of a model can be taken on a sample."""
    if is_lightning(model) and not callable(sample):
        check_lightning(model)
    elif not (isinstance(sample, (Tensor, tuple, Mapping)) or callable(sample)):
        raise InvalidValueError(f"sample {brief(sample)} is not accepted; {_ACCEPTED}")


def loss_of(result: Any) -> Any:
    """Return the loss in a model's result, or the mean of its logits or of its first tensor.

    Example:
        >>> loss_of((torch.ones(2, 2), None))
        tensor(1.)
    """
    for name in ("loss", "logits"):
        found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(found, Tensor):
            return found if name == "loss" else found.float().mean()
    values = list(result.values()) if isinstance(result, Mapping) else result
    floating = [x for x in leaves_of(values) if isinstance(x, Tensor) and x.is_floating_point()]
    return floating[0].float().mean() if floating else None


def sample_size(sample: Any) -> int:
    """Return the leading dimension that the tensors of a sample share.

    Raises:
        InvalidValueError: it is a function, or its tensors do not share one.
    """
    sizes = {x.shape[0] for x in tree_leaves(sample) if isinstance(x, Tensor) and x.dim()}
    if callable(sample) or len(sizes) != 1:
        raise InvalidValueError(
            "the size of the sample is not known; accepted are a tensor, a tuple and a mapping, "
            f"whose tensors have one leading dimension; found are {sorted(sizes)}"
        )
    return int(sizes.pop())


def first_of(sample: Any, size: int) -> Any:
    """Return a sample of the first `size` rows of every tensor.

    Example:
        >>> first_of((torch.zeros(4, 2), 7), 2)[0].shape
        torch.Size([2, 2])
    """
    tree = dict(sample) if isinstance(sample, Mapping) else sample
    return tree_map(lambda x: x[:size] if isinstance(x, Tensor) and x.dim() else x, tree)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"


@contextlib.contextmanager
def unchanged(
    model: nn.Module, sample: Any, modules: list[nn.Module], loop: Loop
) -> Iterator[list[nn.Parameter]]:
    """Have a model ready for a loop's step; put all back on leaving. Yields what is trained.

    Gradients, buffers, the training flags and other attributes of the modules that the step
    reaches, and the random numbers of torch, Python, NumPy and vramx, and of generators that the
    step refers to, are as before.
    Gradients that exist lie on the host in the meantime, for steps add to them where they are.

    Raises:
        InvalidValueError: no parameter requires grad, or one has a hook that a step would run.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    _check(trained)
    with contextlib.ExitStack() as stack:
        stack.callback(hooks_as_now(modules))
        stack.callback(attributes_as_now(modules))
        for module in modules:
            stack.callback(undo_of_module(module, has_weights=False))
        for parameter in nn.ModuleList(modules).parameters():
            if parameter.requires_grad:
                stack.callback(undo_of_gradient(parameter))
        if not model.training:
            model.train()
        loop.prepare(trained)
        stack.enter_context(Caches(model).off())
        stack.enter_context(generators_as_before(found_in(model, sample)))
        stack.enter_context(random.restored_streams())
        yield trained


def reached_by_step(model: nn.Module, sample: Any) -> list[nn.Module]:
    """Return the modules of a model, and others that the loss is made by, as a discriminator."""
    return modules_of(sample, (model,))


def _check(trained: list[nn.Parameter]) -> None:
    if not trained:
        raise InvalidValueError("no parameter of the model requires grad: there is no backward")
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in trained):
        raise InvalidValueError(
            "a parameter has a hook that runs when its gradient is there, and may be an optimizer; "
            "plan before it is registered, with gradients='stepped'"
        )
