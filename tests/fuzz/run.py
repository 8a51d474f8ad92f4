"""Two steps of training of a program, and what they gave: results, gradients, buffers."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz import pieces
from tests.fuzz.api import Plain
from tests.fuzz.settings import Setting
from tests.fuzz.writer import BATCH, TOKENS, WIDTHS

STEPS = 2
_STEP = 2**-7  # of bfloat16, at 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_numbers = itertools.count()


class UnusableError(Exception):
    """torch itself cannot run a program, or its gradients are not finite."""


@dataclass(frozen=True)
class Step:
    """What one step gave."""

    output: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def load(source: str) -> type[nn.Module]:
    """Return the class Program of a source; tracebacks and compilers find its lines."""
    name = f"<program {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names: dict[str, Any] = {"__name__": "tests.fuzz.program"}
    exec(compile(source, name, "exec"), names)
    program: type[nn.Module] = names["Program"]
    return program


def run(
    program: type[nn.Module],
    setting: Setting,
    api: Plain,
    dtype: torch.dtype = torch.float32,
    *,
    noise: int = 0,
    shift: int = 0,
) -> list[Step]:
    """Run the steps of a program through an api; parameters and inputs follow from the setting,
    what packing draws from `noise` too. With a `shift` they are a bit others, by a random step of
    bfloat16 at the most."""
    torch.manual_seed(setting.seed)
    with torch.random.fork_rng():
        model = program().to(DEVICE)
    inputs = [_input(setting) for _ in range(STEPS)]
    if shift:
        generator = torch.Generator().manual_seed(shift)
        for tensor in (*inputs, *model.parameters()):
            steps = torch.rand(tensor.shape, generator=generator) * _STEP
            tensor.data.mul_(1 + steps.to(tensor.device))
    pieces.api = api
    own = _forwards(model)
    api.seed(setting.seed + noise)
    model.to(dtype).train(setting.training)
    call = api.prepare(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = [_step(model, call, x.to(dtype), setting) for x in inputs]
    api.undo(model)
    if _forwards(model) != own:
        raise RuntimeError("a module is not what it was")
    return steps


def _forwards(model: nn.Module) -> list[Any]:
    return [(type(part), "forward" in vars(part)) for part in model.modules()]


def _input(setting: Setting) -> Tensor:
    x = torch.randn(BATCH, TOKENS, WIDTHS[0])
    if setting.raw:
        x = x * torch.logspace(-2, 2, WIDTHS[0]) + 1
    return x.to(DEVICE)


def _step(model: nn.Module, call: Any, x: Tensor, setting: Setting) -> Step:
    torch.manual_seed(setting.seed + 1)  # of dropout
    x = x.detach().requires_grad_(setting.learns_input)
    model.zero_grad()
    with _kept_values(setting), torch.autocast(DEVICE, torch.bfloat16, enabled=setting.autocast):
        y = call(x)
    if not y.requires_grad:
        raise UnusableError("nothing learns")
    weights = torch.randn(y.shape).to(y.device)
    loss = (y.float() * weights).mean()
    slopes: dict[str, Tensor | None] = {}
    if setting.double:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.float().square().sum() * 100
        slopes["slope"] = slope
    if setting.retain:
        loss.backward(retain_graph=True)
        model.zero_grad()
        x.grad = None
    loss.backward()
    gradients = slopes | {name: p.grad for name, p in model.named_parameters()}
    gradients |= {"input": x.grad} if setting.learns_input else {}
    return Step(
        y.detach().clone(),
        {name: None if g is None else g.detach().clone() for name, g in gradients.items()},
        {name: b.detach().clone() for name, b in model.named_buffers()},
    )


@contextlib.contextmanager
def _kept_values(setting: Setting) -> Iterator[None]:
    """Have torch save copies, where a program overwrites what was saved and nobody is to see it."""
    plain = type(pieces.api) is Plain
    if not (plain and setting.overwrites):
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda kept: kept):
        yield


def saved_bytes(program: type[nn.Module], setting: Setting) -> int:
    """Return the bytes that torch holds for backward in a step, memory once: without the program's
    own, which are its parameters, casts of these, buffers and the input."""
    storages: dict[int, Any] = {}
    torch.manual_seed(setting.seed)
    pieces.api = Plain()
    model = program().to(DEVICE).train(setting.training)
    x = _input(setting).requires_grad_(setting.learns_input)
    own = {id(parameter) for parameter in model.parameters()}
    owned = {t.untyped_storage()._cdata for t in (x, *model.parameters(), *model.buffers())}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned and id(_source(tensor)) not in own:
            storages[storage._cdata] = storage
        return tensor.detach()

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept),
        torch.autocast(DEVICE, torch.bfloat16, enabled=setting.autocast),
    ):
        y = model(x)
    kept = [storage.nbytes() for storage in storages.values()]
    del y
    return sum(kept)


def _source(tensor: Tensor) -> Any:
    """Return the leaf that a tensor is a function of alone, as a cast is, if there is one."""
    node: Any = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)
