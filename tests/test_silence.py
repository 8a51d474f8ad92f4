"""What is asked of compression and has no effect is an error, or is told of; no error is a page."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from patch_tools import OPTIONS, Plain, inputs, model, train
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import functional

import vramx
from vramx.errors import InvalidValueError, VramxError, VramxWarning


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- Names that are not there ----------------------------------------------------------------------


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


@torch.library.custom_op("vramx_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


ASKING: dict[str, Callable[[dict[str, Any]], Any]] = {
    "compress": lambda policy: vramx.compress(policy=policy),
    "decorator": lambda policy: vramx.compressed_activations(Plain(), policy=policy),
    "Compression": lambda policy: vramx.compress(vramx.Compression(policy=policy)),
    "optimize": lambda policy: vramx.optimize(model(), policy=policy),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
@pytest.mark.parametrize(
    ("policy", "close"),
    [
        ({"sofmax": "keep"}, "softmax"),
        ({"lineer:0": "keep"}, "linear"),
        ({"dropuot:mask": "keep"}, "dropout"),
        ({"scaled_dot_product_atention": "keep"}, "scaled_dot_product_attention"),
        ({"Sqared": "keep"}, "Squared"),
        ({"halvd": "keep"}, "halved"),
    ],
)
def test_operation_that_does_not_exist_is_named_with_those_alike(
    ask: Callable[[dict[str, Any]], Any], policy: dict[str, Any], close: str
) -> None:
    with pytest.raises(InvalidValueError, match=rf"no such operation \(did you mean.*'{close}'"):
        ask(policy)


@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "mul", "matmul", "__matmul__", "silu", "lstm", "scaled_dot_product_attention"),
        *("native_layer_norm", "checkpoint", "Squared", "halved", "interpolate", "getitem"),
    ],
)
def test_operation_that_exists_is_accepted(name: str) -> None:
    assert vramx.compress(policy={name: "keep"}).options.policy


def test_option_that_does_not_exist_is_named_with_those_alike() -> None:
    for ask in (vramx.compress, vramx.compressed_activations, vramx.compressed_graphs):
        with pytest.raises(InvalidValueError, match=r"'min_byte' is not accepted \(.*'min_bytes'"):
            ask(min_byte=8)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"layers.*": "int8"}, "'layers.\\*': no module's name matches"),
        ({"*": "int8", "0.upp": "int4"}, "'0.upp': .* closest are '0.up'"),
        ({"1.self_atn": "int4"}, "closest are '1.self_attn'"),
    ],
)
def test_pattern_that_matches_no_module_is_an_error_and_changes_nothing(
    patterns: dict[str, str], words: str
) -> None:
    net = model()
    vramx.optimize(net, "int4")
    before = str(vramx.report(net))
    with pytest.raises(InvalidValueError, match=words):
        vramx.optimize(net, patterns)
    assert str(vramx.report(net)) == before


@pytest.mark.parametrize("where", [nn.Conv2d, (nn.Conv2d, nn.GRU), lambda module: False])
def test_choice_that_matches_no_module_names_the_classes_that_there_are(where: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"matches no module; the model has .*Linear"):
        vramx.checkpoint_modules(model(), where=where)


# -- Code that runs later --------------------------------------------------------------------------


def generates(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x.tanh()


async def waits(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


async def generates_later(x: torch.Tensor) -> Any:
    yield x.tanh()


class Generates(nn.Module):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x.tanh()


def by_the_class() -> Any:
    return vramx.compressed_activations(type("Its", (Generates,), {}))


LATER: dict[str, Callable[[], Any]] = {
    "generator": lambda: vramx.compressed_activations(generates),
    "coroutine": lambda: vramx.compressed_activations(level="int4")(waits),
    "asynchronous": lambda: vramx.compressed_activations(generates_later),
    "method": lambda: vramx.compressed_activations(Generates().forward),
    "module": lambda: vramx.compressed_activations(Generates()),
    "class": by_the_class,
    "checkpoint": lambda: vramx.checkpoint_modules(Generates(), where=Generates),
}


@pytest.mark.parametrize("ask", LATER.values(), ids=LATER)
def test_code_that_runs_after_the_call_is_refused(ask: Callable[[], Any]) -> None:
    with pytest.raises(InvalidValueError, match=r"makes an? (asynchronous )?(generator|coroutine)"):
        ask()


# -- A forward that nobody calls -------------------------------------------------------------------


class Trained(nn.Module):
    """As a module of Lightning, whose trainer calls training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, x: torch.Tensor, through: str = "net") -> torch.Tensor:
        return (self(x) if through == "forward" else self.net(x)).square().mean()


def decorated(how: str) -> Any:
    if how == "instance":
        return vramx.compressed_activations(Trained(), **OPTIONS)
    return vramx.compressed_activations(type("Trained", (Trained,), {}), **OPTIONS)()


@pytest.mark.parametrize("how", ["instance", "class"])
def test_module_that_learns_without_its_forward_is_told_of_once(how: str) -> None:
    module = decorated(how)
    with pytest.warns(VramxWarning, match="Trained has packed nothing"):
        module.training_step(inputs()).backward()
    with silent():
        module.training_step(inputs()).backward()
    assert "never called" in str(vramx.report(module))


@pytest.mark.parametrize("how", ["instance", "class"])
def test_module_whose_forward_only_generates_is_told_of(how: str) -> None:
    """As by trainers of GRPO, which generate by its forward and learn by one of their own."""
    module = decorated(how)
    with torch.no_grad():
        module(inputs())
    with pytest.warns(VramxWarning, match="Trained has packed nothing"):
        module.training_step(inputs()).backward()


def test_module_that_learns_by_any_other_method_is_told_of() -> None:
    module = vramx.compressed_activations(Plain(), **OPTIONS)
    with pytest.warns(VramxWarning, match="Plain has packed nothing"):
        module.down(module.up(inputs())).sum().backward()


def test_module_whose_forward_was_replaced_is_told_of_as_that() -> None:
    """As by trainers that fuse the head of a model; decorated after that, it packs."""

    def replace(module: Any) -> None:
        original = module.forward
        module.forward = lambda x, plainly=False: (
            original(x) if plainly else module.down(functional.gelu(module.up(x)))
        )

    module = vramx.compressed_activations(Plain(), **OPTIONS)
    replace(module)
    with pytest.warns(VramxWarning, match=r"Plain has packed nothing: .*another forward in its pl"):
        module(inputs()).sum().backward()
    later = Plain()
    replace(later)
    vramx.compressed_activations(later, **OPTIONS)
    with silent():
        later(inputs()).sum().backward()
    assert vramx.compression_stats(later).packed.tensors


@pytest.mark.parametrize("how", ["instance", "class"])
def test_module_whose_forward_is_called_is_not_told_of(how: str) -> None:
    module = decorated(how)
    with silent():
        module.training_step(inputs(), through="forward").backward()
        module.training_step(inputs()).backward()
    assert "never called" not in str(vramx.report(module))


def test_a_predicted_step_is_no_step_and_the_next_one_is_told_of() -> None:
    module, x = vramx.compressed_activations(Plain(), **OPTIONS), inputs()
    with silent():
        vramx.predict(lambda: module(x).sum().backward())
    with pytest.warns(VramxWarning, match="its forward is never called"):
        module.down(module.up(inputs())).sum().backward()


def test_restored_module_is_not_told_of() -> None:
    module = vramx.compressed_activations(Plain(), **OPTIONS)
    vramx.restore(module)
    with silent():
        train(module)
    assert all(not p._backward_hooks for p in module.parameters())


def test_packed_module_is_shared_and_saved_without_a_word() -> None:
    module = vramx.compressed_activations(Plain(), **OPTIONS)
    with silent():
        reduce_tensor(next(module.parameters()))
        pickle.dumps(module)
        copy.deepcopy(module)


def test_class_is_restored_with_its_training_step() -> None:
    its = type("Its", (Trained,), {"training_step": Trained.training_step})
    before = dict(vars(its))
    vramx.compressed_activations(its, **OPTIONS)
    assert len(vramx.restore(its)) == 1
    assert dict(vars(its)) == before


# -- Errors that can be read -----------------------------------------------------------------------

LARGE = nn.Sequential(*(Plain() for _ in range(50)))
MISTAKES: dict[str, Callable[[], Any]] = {
    "stats": lambda: vramx.compression_stats(LARGE),
    "options": lambda: vramx.compress(LARGE),  # type: ignore[arg-type]
    "level of compress": lambda: vramx.compress(level=LARGE),
    "min_bytes": lambda: vramx.compress(min_bytes=LARGE),
    "policy": lambda: vramx.compress(policy=LARGE),
    "rounding": lambda: vramx.compress(rounding=LARGE),
    "offload": lambda: vramx.compress(offload=LARGE),
    "target": lambda: vramx.compressed_activations([LARGE]),  # type: ignore[call-overload]
    "restore": lambda: vramx.restore([LARGE]),
    "report": lambda: vramx.report({"model": LARGE}),
    "optimize": lambda: vramx.optimize([LARGE]),  # type: ignore[arg-type]
    "level": lambda: vramx.optimize(LARGE, LARGE),  # type: ignore[arg-type]
    "keep": lambda: vramx.optimize(LARGE, keep=LARGE),  # type: ignore[arg-type]
    "where": lambda: vramx.checkpoint_modules(LARGE, where=[LARGE]),  # type: ignore[arg-type]
    "no match": lambda: vramx.checkpoint_modules(LARGE, where=lambda module: None),
    "every": lambda: vramx.checkpoint_modules(LARGE, where=Plain, every=LARGE),  # type: ignore[arg-type]
    "plan": lambda: vramx.plan([LARGE], inputs()),  # type: ignore[arg-type]
    "sample": lambda: vramx.plan(LARGE, [LARGE]),
    "budget": lambda: vramx.plan(LARGE, inputs(), LARGE),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_no_error_prints_a_model(mistake: Callable[[], Any]) -> None:
    with pytest.raises(VramxError) as error:
        mistake()
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 400
