"""A language model of which only the way to its head computes: what it does there, without layers.

A bare model is of the model's own class and has the model's own attributes, but no weights. Modules
on the way from the model to its head compute as they do, the head has few inputs, and every other
module gives rows of a matrix, whatever it is called with. So no config has to be made small, no
layer has to be known, and no call needs images or sounds. Touches no tensor of the model and keeps
none; draws from torch's generator. Milliseconds, and some microseconds a module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.nn.families.questions import parameters_of
from vramx.nn.families.small import MOST_WEIGHTS, Call, call_with_labels
from vramx.patch.module import original_class
from vramx.patch.subclass import RECORD

# The head has as many outputs as the model's, by which configs and loops know it; with 8 inputs
# each, that is small up to half a million.
_WIDTH = 8
_ROWS = 37
# Of what layers give, none is asked for more.
_VALUES = 8
# What is given beside labels where a model takes it: some shift the labels only if they must.
_IDS = ("input_ids", "decoder_input_ids")


def bare_model(model: Any) -> tuple[nn.Module, Call]:
    """Return a model of a model's class of which only the way to its head computes, and a call.

    Raises:
        ValueError: the head is none of the model's modules, or the model would not be small.
    """
    way = way_to_head(model)
    head = way[-1]
    _check_is_small(head.out_features * _WIDTH)
    narrow = nn.Linear(_WIDTH, head.out_features, head.bias is not None)
    rows = nn.Parameter(torch.empty(_ROWS, _WIDTH))
    bare: Any = _on_the_way(way, narrow, rows)
    bare.register_parameter("vramx_rows", rows)
    return bare, _call_of(model)


def _call_of(model: Any) -> Call:
    call = call_with_labels()
    ids = call["input_ids"]
    taken = {parameter.name for parameter in parameters_of(model)}
    given = {**call, **dict.fromkeys(_IDS, ids)}
    # What a model cannot be called without, be that sounds or images: nothing looks at it.
    given.setdefault(getattr(model, "main_input_name", "input_ids"), torch.ones(*ids.shape, _WIDTH))
    return {name: value for name, value in given.items() if name in taken}


def way_to_head(model: Any) -> tuple[Any, ...]:
    """Return a model, the modules on the way from it to its head, and the head.

    Raises:
        ValueError: the head is none of the model's modules.
    """
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None:
        raise ValueError("its head is none of its modules")
    way = [model]
    for part in name.split("."):
        way.append(way[-1]._modules[part])
    return tuple(way)


def _on_the_way(way: Sequence[nn.Module], head: nn.Module, rows: Tensor) -> Any:
    """Return the first module of a way to a head, with that head and without other weights."""
    module, *others = way
    if not others:
        return head
    if "forward" in module.__dict__:
        raise ValueError(f"the forward of its {type(module).__name__} was replaced")
    bare = _without_parts(module)
    if hasattr(bare, "config"):
        bare.config = copy.deepcopy(bare.config)  # as calls may write it
    for name, child in module._modules.items():
        if child is others[0]:
            bare._modules[name] = _on_the_way(others, head, rows)
        elif child is not None:
            bare._modules[name] = _giving(child, rows)
    # A bias of the head's outputs, say.
    for name, parameter in module._parameters.items():
        bare._parameters[name] = None if parameter is None else nn.Parameter(_zeros(parameter))
    for name, buffer in module._buffers.items():
        bare._buffers[name] = None if buffer is None else _zeros(buffer)
    return bare


def _zeros(like: Tensor) -> Tensor:
    _check_is_small(like.numel())
    return torch.zeros(like.shape, dtype=like.dtype, device="cpu")


def _check_is_small(count: int) -> None:
    if count > MOST_WEIGHTS:
        raise ValueError(f"beside its layers, it has {count} weights in one tensor")


def _without_parts(module: nn.Module) -> Any:
    """Return a module of a module's class, with its attributes, but no tensors and no parts."""
    cls = original_class(module)
    bare: Any = cls.__new__(cls)
    nn.Module.__init__(bare)
    own = {*vars(bare), RECORD, "forward"}
    vars(bare).update({name: value for name, value in vars(module).items() if name not in own})
    return bare


def _giving(module: nn.Module, rows: Tensor) -> Any:
    """Return a module of a module's class, with such parts, that gives rows."""
    bare = _without_parts(module)
    for name, child in module._modules.items():
        if child is not None:
            bare._modules[name] = _giving(child, rows)
    # An activation or a loss computes at any width.
    if module._modules or module._parameters or module._buffers:
        bare.forward = _giver(isinstance(module, nn.Embedding), rows)
    return bare


def _giver(is_embedding: bool, rows: Tensor) -> Callable[..., Any]:
    """Return what a module without weights does: rows of ids, rows as they come, or any rows."""

    def give(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if is_embedding and isinstance(x, Tensor):
            return F.embedding(x.remainder(_ROWS), rows)
        if isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1] == _WIDTH:
            return x  # a projection or a norm before the head
        ids = call_with_labels()["input_ids"]
        return _States(last_hidden_state=F.embedding(ids, rows))

    return give


class _States(dict[str, Any]):
    """What layers give, as a dictionary, a tuple or attributes; None for what there is not."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        values = [*self.values(), *[None] * _VALUES]
        return tuple(values[key]) if isinstance(key, slice) else values[key]

    def __getattr__(self, name: str) -> Any:
        return self.get(name)
