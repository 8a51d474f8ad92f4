"""The two routes of an operator: around torch.library in eager mode, through it where one watches.

What is called is the public functions, at sizes at which a call is host time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_elementwise_tools import differs
from norm_tools import sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from vramx.compression.codec import reference
from vramx.compression.config import Compression
from vramx.nn import operators
from vramx.nn.activation import gelu
from vramx.nn.attention import scaled_dot_product_attention
from vramx.nn.batch_norm import batch_norm
from vramx.nn.convolution import conv2d
from vramx.nn.dropout import dropout_add
from vramx.nn.feed_forward import TwoLinears, two_linears
from vramx.nn.glu import swiglu
from vramx.nn.group_norm import group_norm
from vramx.nn.linear import linear, linears
from vramx.nn.loss import linear_cross_entropy
from vramx.nn.low_rank import add_low_rank
from vramx.nn.mlp import mlp
from vramx.nn.norm import Sources, layer_norm, norm, rms_norm
from vramx.nn.relu import relu
from vramx.nn.sides import Side
from vramx.nn.unit_linear import Behind, gelu_linear, glu_linear, unit_linear

HIDDEN = 128
NEAREST = Compression(rounding="nearest")
EXACT = Compression(level="keep")
INT4 = Compression(level="int4", rounding="nearest")
QUERIES = Compression(rounding="nearest", policy={"scaled_dot_product_attention:0,1": "int8"})
Function = Callable[..., Tensor]


def attend(x: Tensor, w: Tensor, keep: Compression = NEAREST, **call: Any) -> Tensor:
    q, k = x.view(1, 4, 2, 64), (x @ w).view(1, 4, 2, 64)
    return scaled_dot_product_attention(q, k, k * 2, keep=keep, **call).y


def image(x: Tensor) -> Tensor:
    return x.view(4, 8, 4, 4)


def of_channels(
    x: Tensor, w: Tensor, keep: Compression = NEAREST, *running: Tensor, training: bool = True
) -> Tensor:
    affine, how = (w[0, :8], w[1, :8]), {"activation": "silu", "keep": keep}
    mean, var = running or (None, None)
    return conv2d(
        batch_norm(image(x), mean, var, *affine, training=training, **how),
        w.view(-1, 8, 2, 2)[:8], keep=keep,
    )  # fmt: skip


def with_sides(x: Tensor, w: Tensor, keep: Compression = NEAREST) -> Tensor:
    sides = [Side(w[:3]), Side(w[3:5], 0.3)]
    return torch.cat(linears(rms_norm(x, keep=keep), [w], None, keep, sides=sides), -1)


def after_dropout(
    x: Tensor, residual: Tensor, w: Tensor, keep: Compression, p: float = 0.3
) -> Tensor:
    normed = norm(Sources(x, residual, p), (w[0], w[1]), (1e-5, True), keep)
    return normed.y.float() + normed.residual_sum.float()


# Of x and of a square weight, and how what they keep is kept.
FUNCTIONS: dict[str, Function] = {
    "norm": lambda x, w, keep=NEAREST: layer_norm(x, w[0], w[1], residual=x, keep=keep).y,
    "norm after dropout": lambda x, w, keep=NEAREST: after_dropout(x, x * w[2], w, keep),
    "norm of two types": lambda x, w, keep=NEAREST: after_dropout(x.double(), x, w, keep, p=0.0),
    "linear": lambda x, w, keep=NEAREST: linear(x, w, w[0], keep),
    "linears": lambda x, w, keep=NEAREST: torch.cat(
        linears(rms_norm(x, keep=keep), [w, w[:3]], [None, w[0, :3]]), 1
    ),
    "mlp": lambda x, w, keep=NEAREST: mlp(rms_norm(x, w[0], keep=keep), [w, w, w], residual=x),
    "two_linears": lambda x, w, keep=NEAREST: two_linears(
        rms_norm(x, w[0], keep=keep), TwoLinears([w, w], [w[0], None], "gelu", w[1]), x, keep
    ),
    "two_linears_exact": lambda x, w, keep=EXACT: two_linears(
        x, TwoLinears([w, w], [None, w[0]], "silu"), keep=keep
    ),
    "conv2d": lambda x, w, keep=NEAREST: conv2d(
        image(x), w.view(-1, 8, 2, 2)[:8], w[0, :8], padding=1, keep=keep
    ),
    "conv2d of batch_norm": of_channels,
    "conv2d of batch_norm, given": lambda x, w, keep=NEAREST: of_channels(
        x, w, keep, torch.zeros(8), torch.ones(8), training=False
    ),
    "group_norm of images": lambda x, w, keep=NEAREST: group_norm(
        image(x), 2, w[0, :8], w[1, :8], activation="leaky_relu", keep=keep
    ).y,
    "batch_norm of images, channels last": lambda x, w, keep=NEAREST: batch_norm(
        image(x).to(memory_format=torch.channels_last), None, None, w[0, :8], training=True,
        keep=keep,
    ).y,
    "gelu": lambda x, w, keep=NEAREST: gelu(x * w[0], keep=keep),
    "gelu_linear": lambda x, w, keep=NEAREST: gelu_linear(x, w, w[0], residual=x, keep=keep),
    "gelu_linear_exact": lambda x, w, keep=EXACT: gelu_linear(x, w, keep=keep),
    "swiglu": lambda x, w, keep=NEAREST: swiglu(x, x * w[0], keep=keep),
    "glu_linear": lambda x, w, keep=NEAREST: glu_linear(x, x * w[0], w, keep=keep),
    "attention": attend,
    "attention, mask": lambda x, w, keep=NEAREST: attend(
        x, w, keep, attn_mask=torch.ones(2, 2, dtype=torch.bool).tril()
    ),
    "attention, queries": lambda x, w, keep=QUERIES: attend(x, w, keep, is_causal=True),
    "relu": lambda x, w, keep=None: relu(x * w[0]),
    "add_low_rank": lambda x, w, keep=None: add_low_rank(x, x[:, :3], w[:, :3], w[0], 0.5),
    "dropout": lambda x, w, keep=None: dropout_add(x * w[0], x, 0.5),
    "dropout in linears": with_sides,
    "dropout in a unit": lambda x, w, keep=NEAREST: torch.cat(
        unit_linear((x, x * w[0]), "silu", Behind(w, side=Side(w[:3], 0.3)), keep), -1
    ),
    "dropout in a unit alone": lambda x, w, keep=NEAREST: torch.cat(
        unit_linear((x,), "gelu", Behind(side=Side(w[:3], 0.3)), keep), -1
    ),
}  # fmt: skip
ONCE_ONLY: dict[str, Function] = {
    "loss": lambda x, w, keep=None: linear_cross_entropy(x, w, torch.arange(len(x))),
    "losses": lambda x, w, keep=None: linear_cross_entropy(
        x, w, torch.arange(len(x)), reduction="none"
    ),
}
EVERY = FUNCTIONS | ONCE_ONLY
# Those that view their rows as so many images or heads.
OF_FOUR_ROWS = ("attention", "conv2d", "images")
every_function = pytest.mark.parametrize("name", EVERY)
every_smooth_function = pytest.mark.parametrize("name", FUNCTIONS)


def inputs() -> tuple[Tensor, Tensor]:
    # Small weights: a saturated softmax would amplify roundings.
    weight = sample(HIDDEN, HIDDEN, seed=1).detach() / HIDDEN**0.5
    return sample(4, HIDDEN), weight.requires_grad_()


class Watch(TorchDispatchMode):
    """A mode that changes nothing and notes the operators that it sees, and calls of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        if func.namespace == "vramx":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def outcome(name: str) -> list[Tensor]:
    """Return a function's result, its gradients and those of their squares where it has these."""
    torch.manual_seed(0)
    leaves, twice = inputs(), name in FUNCTIONS
    result = EVERY[name](*leaves)
    first = torch.autograd.grad((result**2).sum(), leaves, create_graph=twice)
    penalty = sum((gradient**2).sum() for gradient in first)
    second = torch.autograd.grad(penalty, leaves) if twice else ()
    return [result.detach(), *first, *second]


@every_function
def test_both_routes_compute_the_same(name: str) -> None:
    found = outcome(name)
    with Watch() as watch:
        expected = outcome(name)
    assert any(each.startswith("vramx::") for each in watch.seen)
    assert all(map(torch.equal, found, expected))


@every_function
def test_both_routes_save_the_same_tensors_in_the_same_order(name: str) -> None:
    def saved() -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []

        def note(tensor: Tensor) -> Tensor:
            found.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad))
            return tensor

        leaves = inputs()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            EVERY[name](*leaves)
        return found

    found = saved()
    with Watch():
        assert saved() == found


@pytest.mark.parametrize(
    "keep", [NEAREST, EXACT, INT4, None], ids=["int8", "keep", "int4", "no_grad"]
)
@every_function
def test_operators_say_what_they_return(name: str, keep: Compression | None) -> None:
    """In every call that a function makes, forward and backward."""
    leaves = inputs()
    with Watch() as watch, torch.set_grad_enabled(keep is not None):
        others = [keep] if keep in (EXACT, INT4) else []  # else as the table says
        result = EVERY[name](*leaves, *others)
        if keep is not None:
            torch.autograd.grad((result**2).sum(), leaves)
    assert watch.calls or keep in (EXACT, None)  # which torch's own serve
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, arguments, options in watch.calls:
        torch.library.opcheck(operator, arguments, options, test_utils=tests)


@operators.operator(
    "vramx_tests::shared", schema="(Tensor x, Tensor[] more) -> (Tensor, Tensor, Tensor)"
)
def shared(x: Tensor, more: list[Tensor]) -> tuple[Tensor, ...]:
    """Results that lie where an argument does, and where another result does."""
    y = x + 1
    return y, y.view(torch.uint8), more[0].view(-1)


def test_results_that_share_memory_are_apart_for_whoever_watches() -> None:
    arguments = torch.arange(4.0), [torch.ones(2, 2)]
    found = shared(*arguments)
    with Watch() as watch:
        watched = shared(*arguments)
    assert watch.seen == ["vramx_tests::shared"]
    assert all(map(torch.equal, found, watched))
    assert len({x.untyped_storage().data_ptr() for x in (*watched, *arguments[1])}) == 4
    assert found[1].data_ptr() == found[0].data_ptr()


@every_function
def test_backward_can_be_repeated(name: str) -> None:
    torch.manual_seed(0)
    leaves = inputs()
    total = EVERY[name](*leaves).square().sum()
    first, second = (torch.autograd.grad(total, leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@every_function
def test_nothing_is_packed_or_kept_without_gradients(name: str, monkeypatch: Any) -> None:
    for pack in ("quantize", "pack_mask"):
        monkeypatch.setattr(reference, pack, None)
    with torch.no_grad():
        assert not EVERY[name](*inputs()).requires_grad
    with pytest.raises(TypeError, match="not callable"):
        gelu(relu(inputs()[0]))  # which packs


def same_gradients(*functions: Function) -> bool:
    """Tell whether two functions have the same gradients, with the same random numbers."""
    found, leaves = [], inputs()
    for function in functions:
        torch.manual_seed(0)
        found.append(torch.autograd.grad(function(*leaves), leaves))
    return all(map(torch.equal, *found))


@every_smooth_function
def test_a_checkpoint_gives_the_same_gradients(name: str) -> None:
    def again(*leaves: Tensor) -> Any:
        return checkpoint(FUNCTIONS[name], *leaves, use_reentrant=False)

    squares = [lambda *leaves, f=f: (f(*leaves) ** 2).sum() for f in (again, FUNCTIONS[name])]
    assert same_gradients(*squares)


# Attention's result is a view that torch's kernel makes.
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "attention" not in name])
def test_results_can_be_written_to(name: str) -> None:
    """What an autograd.Function returns as a view of its own making cannot."""
    function = FUNCTIONS[name]
    assert same_gradients(
        lambda *leaves: function(*leaves).mul_(2).sum(),
        lambda *leaves: (function(*leaves) * 2).sum(),
    )


@pytest.mark.parametrize("function", [gelu, swiglu, linear, lambda x, w: rms_norm(x, w[0]).y])
def test_compiled_calls_draw_new_noise(function: Any) -> None:
    torch.compiler.reset()
    x, weight = inputs()
    others = [] if function is gelu else [x * 2 if function is swiglu else weight]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    first, second = (
        torch.autograd.grad((compiled(x, *others) ** 2).sum(), (others or [x])[0]) for _ in range(2)
    )
    assert not torch.equal(*first, *second)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in EVERY if not any(w in n for w in OF_FOUR_ROWS)])
def test_a_graph_serves_rows_of_every_number(name: str) -> None:
    torch.compiler.reset()
    function, (_, weight) = EVERY[name], inputs()
    compiled = torch.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (4, 12, 7):
        x = sample(rows, HIDDEN)
        gradients = []
        for called in (function, compiled):
            torch.manual_seed(0)
            gradients.append(torch.autograd.grad((called(x, weight) ** 2).sum(), [x, weight]))
        for expected, found in zip(*gradients, strict=True):
            assert found.shape == expected.shape
            if "dropout" not in name:  # a compiled graph draws its masks elsewhere
                assert differs(found, expected) <= 4
