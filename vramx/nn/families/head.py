"""The head and the loss of a language model of transformers: in training, no logits are made.

Two changes: of the model, which sees whether a call has labels, and of its head, which during such
a call returns a stand-in for the logits (logits.py). All between the two is the model's own
forward: its arguments, its shift of the labels, its caps and its loss function. A class is known by
what a small model of it does with the stand-in: its loss and gradients are the original's, and no
logits were made. What is not so now (a head with an adapter, hooks or other weights, a loss of
somebody's own, replicas of DataParallel) is the original's, call by call. Any thread; a call costs
some tens of microseconds.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from vramx.compression.fakes import PLAIN
from vramx.errors import brief, warn_once
from vramx.nn.families import head_trial
from vramx.nn.families.projection import plain_tensor
from vramx.nn.families.questions import class_name, is_transformed, parameters_of
from vramx.nn.families.swap import Swapped
from vramx.nn.logits import Logits
from vramx.patch.module import find, original_class, patch_of, put
from vramx.patch.torch_functions import is_own, replaced
from vramx.patch.watching import has_other_hooks

_LIBRARY = "transformers."
_OF_LOSSES = ("linear", "cross_entropy")


class _Running(threading.local):
    head: Any = None


_running = _Running()


class Head(NamedTuple):
    """A head, by its name in what optimize() was given, and the language models that it is of.

    They are some within others, the outermost first, which is what a loop calls: any of them may be
    called with labels, and which of them computes the loss is its own business.
    """

    name: str
    module: nn.Module
    models: tuple[Any, ...]


class LossWithoutLogits(Swapped):
    """Of a language model: calls with labels are told to its head."""

    def __init__(self, position: int, loss: Any) -> None:
        self._position = position  # of the labels among the arguments
        self._loss = loss
        self._makes_them = ""  # why, if any call did

    def run(self, module: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels", (*args, None)[min(self._position, len(args))])
        if labels is None or not _learns(module):
            return forward(*args, **kwargs)
        head: Any = module.get_output_embeddings()
        why_not = _head_is_changed(head) or _loss_is_changed(module, self._loss)
        if why_not is not None:
            self._makes_them = f"made its logits: {why_not}"
            warn_once(f"{type(module).__name__} makes its logits: {why_not}")
            return forward(*args, **kwargs)
        with _telling(head):
            return forward(*args, **kwargs)

    def __str__(self) -> str:
        return "loss without logits"

    def effect(self) -> str:
        return self._makes_them


class NoLogits(Swapped):
    """Of a head: what it returns to a language model that trains is a stand-in."""

    def __init__(self, tells: bool = True) -> None:
        self._tells = tells

    def run(self, module: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        is_asked = _running.head is module and torch.is_grad_enabled()
        if not is_asked or type(x) not in PLAIN or not x.is_floating_point():
            return forward(*args, **kwargs)
        return Logits.of(x, module.weight, module.bias, self._tells)

    def __str__(self) -> str:
        return "logits not made in training"


def heads_of(model: nn.Module) -> list[Head]:
    """Return the heads of the language models within a model, those of transformers or of others.

    Example:
        >>> heads_of(nn.Sequential(nn.Linear(8, 8)))
        []
    """
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    found = dict[int, Head]()
    modules: Any = model.modules()
    for module in modules:
        if not hasattr(type(module), "get_output_embeddings") or not _has_labels(module):
            continue
        head: Any = module.get_output_embeddings()
        if isinstance(head, nn.Module) and (name := names.get(id(head))) is not None:
            others = found[id(head)].models if id(head) in found else ()
            found[id(head)] = Head(name, head, (*others, module))
    return list(found.values())


def why_no_head(model: Any, known: Container[int]) -> str | None:
    """Return why no head of a language model of transformers is known; None: there may be none.

    `known` has the ids of the heads that are.
    """
    if not hasattr(type(model), "can_generate") or not (is_known(model) and _has_labels(model)):
        return None
    if not model.can_generate() or any(id(part) in known for part in model.modules()):
        return None
    return "its loss is as it was: get_output_embeddings() gives no head"


def is_known(model: nn.Module) -> bool:
    """Tell whether a module is of a class of transformers, or of one derived from those."""
    return any(class_name(base).startswith(_LIBRARY) for base in type(model).__mro__)


def said_of(head: Head) -> str:
    """Say what is done with a head."""
    names = dict.fromkeys(type(model).__name__ for model in _served(head))
    said = f"the loss of {' and '.join(names)}, without logits"
    return said + "".join(f"; {cls.__name__} is as it was: {why}" for cls, why in left_of(head))


def why_not(head: Head) -> str | None:
    """Return why logits are made as they were; None: some model that the head is of needs none."""
    return None if _served(head) else _why_not(head.models[0], head.module)


def left_of(head: Head) -> list[tuple[type[nn.Module], str]]:
    """Return the class of a head's outermost model, if known, and why it makes logits, if it may.

    A class of the program's own may do no more than hand its labels to a model within.
    """
    model = head.models[0]
    reason = _why_not(model, head.module)
    return [] if reason is None or not is_known(model) else [(original_class(model), reason)]


def swap_head(head: Head) -> None:
    """Have the losses of a head's language models computed without logits."""
    for model in _served(head):
        _swap(model, head.module)


def _served(head: Head) -> list[Any]:
    return [model for model in head.models if _why_not(model, head.module) is None]


def _why_not(model: Any, head: nn.Module) -> str | None:
    cls = original_class(model)
    known = next((b for b in cls.__mro__[1:] if class_name(b).startswith(_LIBRARY)), None)
    if not class_name(cls).startswith(_LIBRARY):
        base = "is not known" if known is None else f"is derived from {known.__name__}: not known"
        return f"its model's class {base}"
    if _labels_of(model) is None:
        return "its forward does not name its labels"
    with head_trial.unlogged():  # which may be none that its forward calls
        loss = _loss_of(model)
    if cls.forward.__module__ != cls.__module__ or "forward" in model.__dict__:
        return "its forward was replaced"
    if not getattr(loss, "__module__", _LIBRARY).startswith(_LIBRARY):
        return f"its loss {getattr(loss, '__qualname__', brief(loss))} is not known"
    if original_class(head) is not nn.Linear or not _is_alone(head):
        return "its head is no plain Linear"
    name = replaced(_OF_LOSSES)
    if name is not None:
        return f"torch.nn.functional.{name} is not torch's own"
    return head_trial.why_not(model, _loss_of, functools.partial(_swap, tells=False))


def _swap(model: Any, head: nn.Module, *, tells: bool = True) -> None:
    position = _labels_of(model)
    assert position is not None
    put(head, NoLogits(tells))
    put(model, LossWithoutLogits(position, _loss_of(model)))


@contextlib.contextmanager
def _telling(head: Any) -> Iterator[None]:
    before, _running.head = _running.head, head
    try:
        yield
    finally:
        _running.head = before


def _learns(model: Any) -> bool:
    compiles = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    is_replica = getattr(model, "_is_replica", False)  # whose results DataParallel joins
    learns = bool(model.training) and torch.is_grad_enabled()
    return learns and not (compiles or is_replica or is_transformed())


def _has_labels(model: nn.Module) -> bool:
    """Tell whether a model's forward takes labels, or one that it may hand them to."""
    forwards = [vars(base)["forward"] for base in type(model).__mro__ if "forward" in vars(base)]
    return any("labels" in inspect.signature(forward).parameters for forward in forwards)


def _labels_of(model: nn.Module) -> int | None:
    names = [parameter.name for parameter in parameters_of(model)]
    return names.index("labels") if "labels" in names else None


def _loss_of(model: Any) -> Any:
    """Return the loss function of a model; None: it has none that can be replaced."""
    return getattr(model, "loss_function", None)


def _loss_is_changed(model: Any, loss: Any) -> str | None:
    name = replaced(_OF_LOSSES)
    if name is not None:
        return f"torch.nn.functional.{name} is not torch's own"
    return None if _loss_of(model) is loss else "its loss_function was replaced since"


def _head_is_changed(head: Any) -> str | None:
    if not isinstance(head, nn.Module) or find(head, NoLogits) is None:
        return f"its head was replaced, by a {class_name(type(head))}, since optimize()"
    if original_class(head) is not nn.Linear or not _is_alone(head):
        return "its head has hooks, another forward or a weight that is no plain tensor"
    return None


def _is_alone(head: Any) -> bool:
    """Tell whether a call of a Linear is its product, and nothing is done around that."""
    state, patch = head.__dict__, patch_of(head)
    others = () if patch is None else (c for c in patch.changes if not isinstance(c, NoLogits))
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        not (has_other_hooks() or "forward" in state or any(others))
        and is_own(nn.Linear.forward, "torch")
        and not any(state[name] for name in hooks)
        and (patch is None or patch.inner is None)
        and plain_tensor(head.weight)
        and (head.bias is None or plain_tensor(head.bias))
    )
