"""What a region's modules are made of in its first run, for one that recomputes it.

torch.func.functional_call, and libraries that learn to learn, give a module other tensors for the
length of a call; adapters are switched, parts and hooks put on and taken off, and weights frozen.
When backward recomputes the call, all that may be as it is next: the gradient would be of another
function. The recomputation has parameters, buffers, parts and forward hooks as they were then, and
the same parameters require a gradient.

Tensors of a class of their own, as of a sharding library, come and go by that library's hooks, in a
recomputation too; and so do all parameters of modules that FSDP1 wraps within the region. Holds
what the graph or the module holds as well. A call costs a microsecond for each module of the
region.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

from vramx.recompute.tensors import without_graph
from vramx.recompute.told import tell_of_change, tell_of_update

_PLAIN = (Tensor, nn.Parameter, type(None))  # a buffer may be none
_Script = torch.jit.ScriptModule
_Members = dict[str, Any]  # of a module: parameters, buffers, parts or hooks
_NONE: _Members = {}  # what every module without has; nothing is put into it
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class Members:
    """The tensors, parts and hooks of modules as they are now, and parameters among arguments."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        leaves: Iterable[Any] = (),
        sharded: Collection[int] = (),
    ) -> None:
        """Note those; `sharded` are the ids of modules whose parameters come and go."""
        # What a module of TorchScript is made of does not change once it is compiled.
        self._modules = tuple(each for each in modules if not isinstance(each, _Script))
        # What is here lives until backward: the fewer objects, the rarer Python's collector runs.
        self._tensors: list[Any] = [
            own
            for each in self._modules
            for own in (_NONE if id(each) in sharded else each._parameters, each._buffers)
        ]
        self._thens = [dict(own) if own else _NONE for own in self._tensors]
        self._others: list[Any] = [each._modules for each in self._modules]
        for each in self._modules:
            self._others += [own for own in map(vars(each).get, _HOOKS) if own]
        self._other_thens = [dict(own) if own else _NONE for own in self._others]
        tensors = (*leaves, *(x for then in self._thens for x in then.values()))
        learnt = {id(x): x for x in tensors if type(x) is nn.Parameter}
        self._learnt = list(learnt.values())
        self._learns = [parameter.requires_grad for parameter in self._learnt]
        self._versions: list[int] = []
        self._read: list[bool] = []

    def settle(self, written: Collection[int]) -> None:
        """Note what the parameters are after the first run, which may have written into them.

        Those whose ids are in `written` others restore.
        """
        self._versions = [parameter._version for parameter in self._learnt]
        self._read = [id(parameter) not in written for parameter in self._learnt]

    def forget_graphs(self) -> None:
        """Hold no graph of buffers that the first run has put others in the place of.

        It may hold an earlier call, and that one what was there before it.
        """
        for own, then in zip(self._tensors[1::2], self._thens[1::2], strict=True):
            if not then or _is_same(own, then):
                continue
            for name, buffer in then.items():
                if buffer is not None and own.get(name) is not buffer:
                    then[name] = without_graph(buffer)

    def _check(self) -> None:
        now = [parameter._version for parameter in self._learnt]
        pairs = zip(self._versions, now, strict=bool(self._versions))
        changed = [i for i, (version, later) in enumerate(pairs) if version != later]
        written = [self._learnt[i] for i in changed if self._read[i]]  # by others
        if any(self._learns[i] for i in changed):
            tell_of_change(written)
        elif written:
            tell_of_update(written)
        # A recomputation may write into them, as the first run does.
        self._versions, self._read = [], []

    def _first_hooks(self) -> list[_Members]:
        """Return the hooks of modules that had none, of which no note is taken in each call."""
        own_of = attrgetter("_forward_hooks", "_forward_pre_hooks")
        every = [own for module in self._modules for own in own_of(module) if own]
        known = {id(own) for own in self._others} if every else set()
        return [own for own in every if id(own) not in known]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have the modules those of then meanwhile, where they have others now."""
        self._check()
        tensors = list(zip(self._tensors, self._thens, strict=True))
        now_others = {id(own): dict(own) for own, then in tensors if not _is_same(own, then)}
        for own, then in tensors if now_others else ():
            _put(own, then)
        pairs = zip(self._others, self._other_thens, strict=True)
        others = [(own, dict(own), then) for own, then in pairs if own != then]
        others += [(own, dict(own), {}) for own in self._first_hooks()]
        learnt = zip(self._learnt, self._learns, strict=True)
        flags = [(p, p.requires_grad) for p, then in learnt if p.requires_grad != then]
        try:
            for own, _, then in others:
                _fill(own, then)
            for parameter, now in flags:
                parameter.requires_grad_(not now)
            yield
        finally:
            for parameter, now in flags:
                parameter.requires_grad_(now)
            for own, before, _ in others:
                _fill(own, before)
            for own, then in tensors:
                _put(own, now_others.get(id(own), then))


def _is_same(own: _Members, members: _Members) -> bool:
    return len(own) == len(members) and not any(map(is_not, own.values(), members.values()))


def _put(own: _Members, members: _Members) -> None:
    """Have a module these tensors and no others, where those of now and then are plain ones."""
    if _is_same(own, members):
        return
    for name in dict.fromkeys((*members, *own)):  # in their order
        now, then = own.get(name), members.get(name)
        if now is then or type(now) not in _PLAIN or type(then) not in _PLAIN:
            continue
        if name in members:
            own[name] = then
        else:
            del own[name]


def _fill(own: _Members, members: _Members) -> None:
    own.clear()
    own.update(members)
