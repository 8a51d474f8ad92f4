"""Whether a block does the same when it is called again, as its recomputation takes for granted.

Each block is run twice ahead of its own call, without a graph, from the same arguments, buffers,
attributes and random numbers, which is what a checkpoint gives a recomputation. What then differs
comes from elsewhere: a clock, a counter that no module has. A result may differ by less than
packing the block's input changes it, because kernels that add in any order do. Two forward passes
of each block; not thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vramx.errors import InvalidValueError, summary
from vramx.planning.blocks import Block
from vramx.planning.caches import check_has_none
from vramx.planning.device_memory import is_out_of_memory
from vramx.planning.words import recomputes
from vramx.recompute.attributes import Attributes
from vramx.recompute.generators import Generators
from vramx.recompute.objects import as_before
from vramx.recompute.structure import flatten, leaves_of

# Of a result's norm. An input at int8 is off by 0.4 to 1.6 % of it.
_DIFFERENCE = 0.01


def why_not_repeated(forward: Callable[[], Any], blocks: Collection[Block]) -> dict[Block, str]:
    """Return why blocks cannot be recomputed, for those of which that is seen.

    Args:
        forward: runs the model's forward pass.
    """
    found: dict[Block, str] = {}
    seen: set[Block] = set()
    with contextlib.ExitStack() as stack:
        for block in blocks:
            hook = _first_call(block, seen, found)
            handle = block.module.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        forward()
    return found


def without_recomputation(
    words: Mapping[Block, Sequence[str]], reasons: Mapping[Block, str]
) -> tuple[dict[Block, list[str]], list[str]]:
    """Return the words without those that recompute for a class with a reason, and a line for each.

    Raises:
        InvalidValueError: a block has no word left.
    """
    of_class: dict[type, tuple[Block, str]] = {}
    for block, reason in reasons.items():
        of_class.setdefault(type(block.module), (block, reason))
    kept, lost = dict[Block, list[str]](), dict[type, list[str]]()
    for block, own in words.items():
        cls = type(block.module)
        kept[block] = [word for word in own if cls not in of_class or not recomputes(word)]
        left = [word for word in own if word not in kept[block]]
        if left:
            lost[cls] = left
        if not kept[block]:
            raise InvalidValueError(
                f"{block.name} cannot be recomputed ({of_class[cls][1]}); plan with levels that "
                "recompute nothing, such as levels=('left', 'int8')"
            )
    return kept, [left_out(left, *of_class[cls]) for cls, left in lost.items()]


def left_out(words: Sequence[str], block: Block, reason: str) -> str:
    """Say which words a class of blocks does without, and why."""
    return f"{type(block.module).__name__} has no {', '.join(words)}: {block.name}: {reason}"


def _first_call(block: Block, seen: set[Block], found: dict[Block, str]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        check_has_none(block.name, kwargs)
        if block in seen:
            return
        seen.add(block)
        try:
            reason = _differs(module, args, kwargs)
        except Exception as error:  # what is wrong with the block itself its own call says
            if is_out_of_memory(error):
                raise
            reason = f"a trial of it, without a graph, fails: {summary(error)}"
        if reason is not None:
            found[block] = reason

    return hook


def _differs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Return what differs between two runs of a block; None: nothing does."""
    modules = list(module.modules())
    attributes = Attributes(modules)
    held = (*leaves_of((args, kwargs)), *attributes.generators)
    generators = Generators((module.forward,), modules, held)
    first = _run(module, args, kwargs)
    attributes.settle()
    with attributes.restored(), generators.restored():
        second = _run(module, args, kwargs)
    return _difference(first, second)


def _run(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Run a block as its recomputation would; torch's numbers and buffers stay as they are."""
    leaves, structure = flatten((args, kwargs))
    args, kwargs = structure.rebuild(list(map(_again, leaves)))
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(list(devices)), _copied_buffers(module):
        result = module.forward(*args, **kwargs)
    return [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    own = [(p, n, b) for p in module.modules() for n, b in p._buffers.items() if b is not None]
    for part, name, buffer in own:
        part._buffers[name] = buffer.detach().clone()
    try:
        yield
    finally:
        for part, name, buffer in own:
            part._buffers[name] = buffer


def _again(leaf: Any) -> Any:
    """Return an argument that a run may write into."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone() if leaf.requires_grad else leaf
    kept = as_before(leaf)
    return leaf if kept is leaf else kept.again()


def _difference(first: list[Tensor], second: list[Tensor]) -> str | None:
    if [(x.shape, x.dtype) for x in first] != [(x.shape, x.dtype) for x in second]:
        return "its results have other shapes when it is called again"
    for one, other in zip(first, second, strict=True):
        if not one.is_floating_point() or torch.equal(one, other):
            continue
        size = float(one.double().norm())
        share = float((one.double() - other.double()).norm()) / size if size else float("inf")
        if not share <= _DIFFERENCE:
            return f"its result differs by {share:.2g} of it when it is called again"
    return None
