"""The steps that programs are made of.

A step writes lines that take a value and give one; most are one line, in a table. `smooth` are
those of which vramx promises to pack what they save. Steps that change what they were given make a
value of their own first, so that each program is right in torch.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.lines import HIDDEN, LINES, SMOOTH_LINES, WRITES
from tests.fuzz.writer import TOKENS, WIDTHS, Value, Writer

Step = Callable[[Writer, Value], Value]
STEPS: dict[str, Step] = {}
SMOOTH: set[str] = set()
POWERS = frozenset({"square", "cube"})
# What dynamo cannot trace, or is not to: it would be tested as a break of a graph only.
EAGER: set[str] = set()


def step(name: str, *, smooth: bool = False, eager: bool = False) -> Callable[[Step], Step]:
    """Add a step to the grammar."""

    def add(function: Step) -> Step:
        STEPS[name] = function
        SMOOTH.update([name] if smooth else [])
        EAGER.update([name] if eager else [])
        return function

    return add


def _of_line(text: str) -> Step:
    return lambda w, h: w.let(text.format(h), h.width)


def _of_lines(lines: list[str]) -> Step:
    def write(w: Writer, h: Value) -> Value:
        result = w.let(f"{h}", h.width)
        for line in lines:
            w.line(line.format(h, result))
        return result

    return write


def _of_hidden_write(text: str) -> Step:
    def write(w: Writer, h: Value) -> Value:
        if (
            w.kinds or not w.keeps_values
        ):  # a region that runs again would have the new values in both layers
            return linear(w, h)
        w.overwrites = True
        first, second = (w.module(f"nn.Linear({h.width}, {h.width})") for _ in range(2))
        fresh = w.let(f"{h} * 1.5", h.width)
        before = w.let(f"{first}({fresh})", h.width)
        w.line(text.format(h, fresh))
        return w.let(f"{before} + {second}({fresh})", h.width)

    return write


for _name, _text in (SMOOTH_LINES | LINES).items():
    step(_name, smooth=_name in SMOOTH_LINES, eager=_name == "vmapped")(_of_line(_text))
for _name, _texts in WRITES.items():
    step(_name, eager=True)(_of_lines(_texts))
for _name, _text in HIDDEN.items():
    step(_name, eager=True)(_of_hidden_write(_text))


@step("scripted", eager=True)
def scripted(w: Writer, h: Value) -> Value:
    # A checkpoint stops a recomputation by an exception, which TorchScript makes another of.
    inside = any("checkpoint" in kind for kind in w.kinds)
    return linear(w, h) if inside else w.let(f"pieces.scripted({h})", h.width)


@step("linear", smooth=True)
def linear(w: Writer, h: Value) -> Value:
    width, bias = w.choose(WIDTHS), w.choose((True, False))
    layer = w.module(f"nn.Linear({h.width}, {width}, bias={bias})")
    return w.let(f"{layer}({h})", width)


@step("mlp", smooth=True)
def mlp(w: Writer, h: Value) -> Value:
    up, down = w.module(f"nn.Linear({h.width}, 128)"), w.module(f"nn.Linear(64, {h.width})")
    wide = w.let(f"{up}({h})", 128)
    gate = w.let(f"F.silu({wide}[..., :64]) * {wide}[..., 64:]", 64)
    return w.let(f"{h} + {down}({gate})", h.width)


@step("norm", smooth=True)
def norm(w: Writer, h: Value) -> Value:
    return w.let(f"{w.module(f'nn.LayerNorm({h.width})')}({h})", h.width)


@step("rms_norm")
def rms_norm(w: Writer, h: Value) -> Value:
    """Its rows are kept where they do not lie together in memory."""
    return w.let(f"{w.module(f'nn.RMSNorm({h.width})')}({h})", h.width)


@step("channel_norm", smooth=True)
def channel_norm(w: Writer, h: Value) -> Value:
    # Beside it, or the gradients of what it undoes cancel: a shift and a scale of its channels.
    return w.let(f"{h} + {_normal(w, h)}", h.width)


def _normal(w: Writer, h: Value) -> str:
    kinds = (
        f"nn.BatchNorm1d({h.width})",
        f"nn.GroupNorm(4, {h.width})",
        f"nn.InstanceNorm1d({h.width}, affine=True, track_running_stats=True)",
    )
    return f"{w.module(w.choose(kinds))}({h}.transpose(1, 2)).transpose(1, 2)"


@step("uneven_norm", smooth=True)
def uneven_norm(w: Writer, h: Value) -> Value:
    """A norm of columns that differ in scale, or that are far from zero, or both."""
    columns = f"torch.linspace(-1.5, 1.5, {h.width}).to({h})"
    scale, shift = w.choose(((1, 0), (0, 20), (1, 300)))
    uneven = w.let(f"{h} * (10 ** ({scale} * {columns})) + {shift} * {columns}", h.width)
    return w.let(f"{h} + {_normal(w, uneven)}", h.width)


@step("conv1d", smooth=True)
def conv1d(w: Writer, h: Value) -> Value:
    width = w.choose(WIDTHS)
    options = w.choose(("padding=1", "padding=2, dilation=2", "padding=1, groups=4"))
    layer = w.module(f"nn.Conv1d({h.width}, {width}, 3, {options})")
    return w.let(f"{layer}({h}.transpose(1, 2)).transpose(1, 2)", width)


@step("conv2d", smooth=True)
def conv2d(w: Writer, h: Value) -> Value:
    kinds = (f"nn.Conv2d({h.width}, 16, 3, padding=1)", f"nn.ConvTranspose2d({h.width}, 16, 1)")
    layer = w.module(w.choose(kinds))
    image = f"{h}.transpose(1, 2).unflatten(2, (4, 4))"
    return w.let(f"{layer}({image}).flatten(2).transpose(1, 2)", 16)


@step("convolution_block")
def convolution_block(w: Writer, h: Value) -> Value:
    """Convolution, batch norm, ReLU, pooling, as in image models."""
    layer = w.module(f"nn.Conv2d({h.width}, 32, 3, padding=1, bias=False)")
    statistics, relu = w.module("nn.BatchNorm2d(32)"), w.module("nn.ReLU(inplace=True)")
    image = w.let(f"{h}.transpose(1, 2).unflatten(2, (4, 4))", h.width)
    made = w.let(f"{relu}({statistics}({layer}({image})))", 32)
    pool = w.choose(("F.max_pool2d({0}, 3, 1, 1)", "F.avg_pool2d({0}, 3, 1, 1)"))
    return w.let(f"{pool.format(made)}.flatten(2).transpose(1, 2)", 32)


@step("recurrent")
def recurrent(w: Writer, h: Value) -> Value:
    kind = w.choose(("LSTM", "GRU", "RNN"))
    layer = w.module(f"nn.{kind}({h.width}, 16, batch_first=True)")
    return w.let(f"{layer}({h})[0]", 16)


@step("cell")
def cell(w: Writer, h: Value) -> Value:
    """A recurrent network that is written out, step by step."""
    layer = w.module(f"nn.{w.choose(('GRUCell', 'RNNCell'))}({h.width}, 16)")
    state = w.let(f"{h}.new_zeros({h}.shape[0], 16)", 16)
    rows = w.let("[]", 16)
    w.line(f"for row in {h}.unbind(1)[:6]:")
    w.line(f"    {state} = {layer}(row, {state}.to(row.dtype))")
    w.line(f"    {rows}.append({state})")
    return w.let(f"torch.stack({rows} + [{state}] * {TOKENS - 6}, 1)", 16)


def _heads(w: Writer, h: Value) -> list[str]:
    layer = w.module(f"nn.Linear({h.width}, {3 * h.width})")
    parts = w.let(f"{layer}({h}).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)", h.width)
    return [f"{parts}[{i}]" for i in range(3)]


@step("attention")
def attention(w: Writer, h: Value) -> Value:
    query, key, value = _heads(w, h)
    causal = w.choose((True, False))
    if w.double:  # the fused kernels have no second derivative
        w.line("with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):")
        mixed = w.let(f"F.scaled_dot_product_attention({query}, {key}, {value})", h.width)
        # The call stands in the context.
        w.indent_last()
    else:
        mixed = w.let(
            f"F.scaled_dot_product_attention({query}, {key}, {value}, is_causal={causal})", h.width
        )
    out = w.module(f"nn.Linear({h.width}, {h.width})")
    return w.let(f"{h} + {out}({mixed}.transpose(1, 2).flatten(2))", h.width)


@step("written_attention")
def written_attention(w: Writer, h: Value) -> Value:
    query, key, value = _heads(w, h)
    weights = w.let(f"({query} @ {key}.transpose(-1, -2) * 0.3).softmax(-1)", h.width)
    mixed = w.let(f"F.dropout({weights}, 0.1, self.training) @ {value}", h.width)
    return w.let(f"{h} + {mixed}.transpose(1, 2).flatten(2)", h.width)


@step("torch_attention")
def torch_attention(w: Writer, h: Value) -> Value:
    layer = w.module(f"nn.MultiheadAttention({h.width}, 2, batch_first=True)")
    weights = True if w.double else w.choose((True, False))
    return w.let(f"{h} + {layer}({h}, {h}, {h}, need_weights={weights})[0]", h.width)


@step("experts")
def experts(w: Writer, h: Value) -> Value:
    """Each token goes to the expert that a router chooses."""
    router = w.module(f"nn.Linear({h.width}, 4)")
    layers = w.module(f"nn.ModuleList(nn.Linear({h.width}, {h.width}) for _ in range(4))")
    chance = w.let(f"{router}({h}).softmax(-1).max(-1)", 4)
    result = w.let(f"torch.zeros_like({h})", h.width)
    w.line(f"for number, expert in enumerate({layers}):")
    w.line(f"    mine = {chance}.indices == number")
    w.line(
        f"    {result} = {result}.masked_scatter(mine.unsqueeze(-1), "
        f"(expert({h}[mine]) * {chance}.values[mine].unsqueeze(-1)).to({result}.dtype))"
    )
    return w.let(f"{h} + {result}", h.width)


@step("embedding")
def embedding(w: Writer, h: Value) -> Value:
    table = w.module(f"nn.Embedding(16, {h.width})")
    return w.let(f"{h} + {table}({h}[..., :16].argmax(-1))", h.width)


@step("rewritten")
def rewritten(w: Writer, h: Value) -> Value:
    """Two layers read one memory, which is written in between."""
    first, second = (w.module(f"nn.Linear({h.width}, {h.width})") for _ in range(2))
    fresh = w.let(f"{h} * 1.5", h.width)
    if w.kinds or not w.keeps_values:  # torch itself refuses
        return w.let(f"{first}({fresh})", h.width)
    w.overwrites = True
    before = w.let(f"{first}({fresh})", h.width)
    w.line(f"{fresh}[:, ::2] = {h}.tanh()[:, 1::2]")
    return w.let(f"{before} + {second}({fresh})", h.width)


@step("shared_layer", smooth=True)
def shared_layer(w: Writer, h: Value) -> Value:
    layer = w.module(f"nn.Linear({h.width}, {h.width})")
    return w.let(f"{layer}({layer}({h}).tanh()) + {layer}({h})", h.width)


@step("tied_weight", smooth=True)
def tied_weight(w: Writer, h: Value) -> Value:
    layer = w.module(f"nn.Linear({h.width}, 64, bias=False)")
    return w.let(f"F.linear({layer}({h}), {layer}.weight.t())", h.width)


@step("weight_norm")
def weight_norm(w: Writer, h: Value) -> Value:
    kind = w.choose(("weight_norm", "spectral_norm"))
    layer = w.module(f"nn.utils.parametrizations.{kind}(nn.Linear({h.width}, {h.width}))")
    return w.let(f"{layer}({h})", h.width)


@step("gain", smooth=True)
def gain(w: Writer, h: Value) -> Value:
    scale = w.module(f"nn.Parameter(torch.randn({h.width}) * 0.1 + 1)")
    return w.let(f"{h} * {scale}", h.width)


@step("skip", smooth=True)
def skip(w: Writer, h: Value) -> Value:
    other = w.earlier(h.width)
    return h if other is None else w.let(f"{h} + {other}", h.width)


@step("product", smooth=True)
def product(w: Writer, h: Value) -> Value:
    other = w.earlier(h.width)
    return h if other is None else w.let(f"{h} * {other}.sigmoid()", h.width)


@step("side_stream")
def side_stream(w: Writer, h: Value) -> Value:
    layer = w.module(f"nn.Linear({h.width}, {h.width})")
    return w.let(f"pieces.on_side_stream({layer}, {h})", h.width)
