"""Programs that put functions of their own in the place of torch's: these run, each call once.

Other attention, quantised products, counters of operations and losses are assigned to
torch.nn.functional, to a class of torch.nn or to Tensor, before a model is changed or after it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optimize_tools import EVERY_FAMILY, INT8_NOISE, error, family, gradient_of
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as modules

import vramx
from vramx.errors import VramxWarning
from vramx.nn.families.questions import untouched
from vramx.patch.torch_functions import OF_MODULES, is_own, replaced
from vramx.planning.fake_answers import answering

ATTENTION = "scaled_dot_product_attention"


@contextlib.contextmanager
def assigned(holder: Any, name: str, factor: float = 0.5, wrap: Any = None) -> Iterator[list[str]]:
    """Have a function give a half of what it did; list its calls."""
    original, calls = getattr(holder, name), []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        found = original(*args, **kwargs)
        if isinstance(found, Tensor):
            return found * factor
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found

    setattr(holder, name, own if wrap is None else wrap(original)(own))
    try:
        yield calls
    finally:
        setattr(holder, name, original)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))


def hooked(model: nn.Module) -> nn.Module:
    vramx.compressed_activations(model, level="int8", min_bytes=1)
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    vramx.checkpoint_modules(model, where=nn.Linear, level="int8")
    return model


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Any]] = {
    "context": (lambda model: model, lambda: vramx.compress("int8", min_bytes=1)),
    "decorator": (hooked, contextlib.nullcontext),
    "checkpoint": (checkpointed, contextlib.nullcontext),
}
PLACES = [
    *((functional, name) for name in ("linear", "gelu", "layer_norm", "cross_entropy")),
    *((nn.Linear, "forward"), (nn.Module, "__call__"), (Tensor, "sum")),
]


@pytest.mark.parametrize("wrap", [None, functools.wraps])
@pytest.mark.parametrize(("holder", "name"), PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_a_function_of_the_program_runs_once_a_call(
    way: str, holder: Any, name: str, wrap: Any
) -> None:
    change, context = WAYS[way]
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(64) % 10

    def gradient(model: nn.Module, within: Any) -> Tensor:
        with within():
            loss = functional.cross_entropy(model(x), targets, reduction="none").sum()
            return torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])

    with assigned(holder, name, wrap=wrap):
        expected = gradient(layers(), contextlib.nullcontext)
        # What int8 rounds by: far from a factor that comes twice.
        assert error(gradient(change(layers()), context), expected) < 0.05


def test_a_backward_of_the_program_runs_once() -> None:
    model, gradients = nn.Linear(8, 8), []
    original = Tensor.backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "backward", lambda self, *args: original(self * 3.0, *args))
        for context in (contextlib.nullcontext(), vramx.compress()):
            model.zero_grad()
            with context:
                model(torch.ones(1, 8)).sum().backward()
            assert model.weight.grad is not None
            gradients.append(model.weight.grad)
    assert torch.equal(*gradients)


def heads_and_step() -> tuple[Callable[[], None], nn.Module]:
    model = nn.Linear(64, 192)
    x = torch.randn(2, 256, 64)

    def step() -> None:
        model.zero_grad()
        heads = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in model(x).chunk(3, -1))
        functional.scaled_dot_product_attention(*heads).sum().backward()

    return step, model


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_prediction_is_of_the_programs_attention(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = heads_and_step()
    scores_bytes = 2 * 4 * 256 * 256 * 4
    assert vramx.predict(step, device=device).peak_bytes() < 4 * scores_bytes

    def attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        scores = [torch.softmax(q @ k.mT / 8 + i, -1) for i in range(4)]
        return torch.stack(scores).sum(0) @ v

    monkeypatch.setattr(functional, ATTENTION, attention)
    assert vramx.predict(step, device=device).peak_bytes() > 4 * scores_bytes


def test_attention_is_computed_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model = heads_and_step()
    torchs = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, ATTENTION, lambda q, k, v: torchs(q * 4, k, v))
    step()
    expected = model.weight.grad
    with vramx.compress("int8", min_bytes=1):
        step()
    assert expected is not None
    assert model.weight.grad is not None
    assert error(model.weight.grad, expected) < 0.05


@contextlib.contextmanager
def hook_of_all() -> Iterator[list[str]]:
    handle = modules.register_module_forward_hook(
        lambda module, _, found: found * 0.5 if isinstance(module, nn.Linear) else None
    )
    yield ["hook"]
    handle.remove()


def changed_functions(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Return what a program may put in the place of functions that a model calls."""
    blocks = [m for m in model.modules() if vars(type(m)).get("_vramx_original")]
    original: Any = vars(type(blocks[0]))["_vramx_original"]
    return {
        **{
            name: functools.partial(assigned, functional, name)
            for name in ("linear", "layer_norm", "batch_norm")
        },
        ATTENTION: functools.partial(assigned, functional, ATTENTION),
        "Linear.forward": functools.partial(assigned, nn.Linear, "forward", wrap=functools.wraps),
        "Dropout.forward": functools.partial(assigned, nn.Dropout, "forward"),
        "Module.__call__": functools.partial(assigned, nn.Module, "__call__"),
        "forward of the block": functools.partial(assigned, original, "forward"),
        "hook of all modules": hook_of_all,
    }


@pytest.mark.filterwarnings("ignore:.*optimize")
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_what_is_replaced_later_stays_in_use(name: str) -> None:
    original, inputs = family(name)
    model = copy.deepcopy(original)
    vramx.optimize(model, "int8")
    for what, change in changed_functions(model).items():
        torch.manual_seed(0)
        with change():
            expected = gradient_of(original, inputs)
            found = gradient_of(model, inputs)
        assert error(found, expected) < INT8_NOISE, what


@pytest.mark.filterwarnings("ignore:.*optimize")
def test_a_trial_is_of_the_functions_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", lambda *args: torch.ops.aten.linear(*args) * 2)
        with pytest.warns(VramxWarning, match=r"torch.nn.functional.linear is not torch's"):
            assert not vramx.optimize(model).swapped
    assert vramx.optimize(model).swapped  # nothing is remembered of the other
    vramx.restore(model)
    monkeypatch.setattr(nn.TransformerEncoderLayer, "_ff_block", lambda _, x: x)
    assert not vramx.optimize(model).swapped


@pytest.mark.parametrize("wrap", [lambda _: lambda own: own, functools.wraps])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_of_the_program_is_the_one_that_is_taken(
    is_first: bool, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = nn.Linear(8, 8), []
    optimizer = torch.optim.Adagrad(model.parameters())
    original = torch.optim.Adagrad.step

    @wrap(original)
    def step(self: Any, *args: Any) -> Any:
        calls.append(self)
        return original(self, *args)

    if is_first:
        monkeypatch.setattr(torch.optim.Adagrad, "step", step)
    vramx.offload_optimizer(optimizer)
    monkeypatch.setattr(torch.optim.Adagrad, "step", step)
    for expected in (1, 1):
        model(torch.ones(1, 8)).sum().backward()
        calls.clear()
        optimizer.step()
        assert len(calls) == expected
        monkeypatch.setattr(torch.optim.Adagrad, "step", original)
        optimizer.step()
        assert len(calls) == expected
        monkeypatch.setattr(torch.optim.Adagrad, "step", step)


def test_a_forward_that_a_class_is_given_after_the_first_question_is_seen() -> None:
    module = nn.Linear(2, 2)
    assert untouched(module)
    for _ in range(2):
        with assigned(nn.Linear, "forward"):
            assert not untouched(module)
        assert untouched(module)


def test_functions_of_torch_are_its_own() -> None:
    names = (*OF_MODULES, ATTENTION, "cross_entropy")
    assert replaced(names) is None
    with answering():  # blocks are predicted as they run
        assert replaced(names) is None
    assert is_own(Tensor.__pow__, "torch")
    assert is_own(nn.Module.__call__, "torch")
    for other in (torch.compiler.disable(layers), functools.partial(functional.linear), layers):
        assert not is_own(other, "torch")
