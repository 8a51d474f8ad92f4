"""Projections: what a Linear computes, with its adapters, by its module.

A projection is a weight and a bias, and low-rank adapters: scale * B A dropout(x) each. Projections
of one source keep it together: a frozen weight needs nothing of it, A needs it for its gradient,
and B the product of A, which is narrow and kept as it is. Where the weight is no plain tensor
(quantised, say) the module that has it is called, as is a module that is not understood: whatever
it is, it computes what it does. Known by its name and by what it has is peft's LoRA, without an
import of peft. No state; any thread; some microseconds a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.compression.fakes import PLAIN
from vramx.nn.arguments import own
from vramx.nn.families.questions import class_name, untouched
from vramx.nn.keeping import Kept
from vramx.nn.linear import linears
from vramx.nn.low_rank import add_low_rank
from vramx.nn.norm import Normed
from vramx.nn.readers import Behind
from vramx.nn.sides import Side, can_join, joined

# What goes into projections: a norm's result, or any tensor.
Source = Normed | Tensor
Terms = tuple[Tensor, Tensor | None]

CONV1D = "transformers.pytorch_utils.Conv1D"
# Whose forward is the base's result, and scale * B(A(dropout(x))) for each active adapter.
LORAS = frozenset(
    (
        "peft.tuners.lora.layer.Linear",
        "peft.tuners.lora.bnb.Linear4bit",
        "peft.tuners.lora.bnb.Linear8bitLt",
    )
)
# Their forward is a product of their weight and an addition of their bias.
QUANTISED = frozenset(
    ("bitsandbytes.nn.modules.Linear4bit", "bitsandbytes.nn.modules.Linear8bitLt")
)


class Adapter(NamedTuple):
    """Weights (rank, inputs) and (outputs, rank), the second's bias, a scale, a probability."""

    first: Tensor
    second: Tensor
    bias: Tensor | None
    scale: float
    p: float

    def side(self) -> Side:
        """Return what reads the projection's input."""
        return Side(self.first, self.p)


class Projection(NamedTuple):
    """A weight (outputs, inputs) and a bias, or a module that is called; and adapters."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    base: Any = None

    def is_known(self) -> bool:
        """Tell whether it is a product of a weight, a plain one or one of QUANTISED."""
        return self.weight is not None or class_name(type(self.base)) in QUANTISED

    def may_add(self) -> bool:
        """Tell whether a constant may be added to what the product gives."""
        if self.weight is None:
            base_adds = not self.is_known() or self.base.bias is not None
        else:
            base_adds = self.bias is not None
        return base_adds or any(adapter.bias is not None for adapter in self.adapters)


def tensor_of(source: Source) -> Tensor:
    """Return the tensor that a source stands for."""
    return source.y if isinstance(source, Normed) else source


def projection_of(module: Any) -> Projection:
    """Return what a module computes; its own call, where that is not understood."""
    terms = terms_of(module)
    if terms is not None:
        return Projection(*terms)
    adapters = _adapters_of(module)
    if isinstance(adapters, str):
        return Projection(base=module)
    base = terms_of(module.base_layer)
    if base is None:
        return Projection(adapters=adapters, base=module.base_layer)
    return Projection(*base, adapters)


def why_not(module: Any) -> str | None:
    """Return why a module that stands for a Linear is called as it is; None: it is not."""
    if terms_of(module) is not None:
        return None
    adapters = _adapters_of(module)
    return f"{adapters}: called as it is" if isinstance(adapters, str) else None


def terms_of(module: Any) -> Terms | None:
    """Return the weight (outputs, inputs) and the bias of a Linear; None if it is no plain one."""
    transposed = type(module) is not nn.Linear
    if transposed and class_name(type(module)) != CONV1D:
        return None
    weight, bias = own(module, "weight"), own(module, "bias")
    if type(weight) not in PLAIN or (bias is not None and type(bias) not in PLAIN):
        return None
    if not untouched(module):
        return None
    return weight.t() if transposed else weight, bias


def project(
    source: Source, modules: Sequence[nn.Module], keep: Compression, kept: Kept | None = None
) -> list[Tensor]:
    """Return what each of several modules makes of one source, which they keep together.

    `kept` is what already is kept of a source that is a tensor.
    """
    weights, biases = [], []
    for module in modules:
        terms = terms_of(module)
        if terms is None:
            found = [projection_of(each) for each in modules]
            return projected(source, found, keep, kept)
        weights.append(terms[0])
        biases.append(terms[1])
    return list(linears(source, weights, biases, keep, kept))


def projected(
    source: Source, found: Sequence[Projection], keep: Compression, kept: Kept | None = None
) -> list[Tensor]:
    """Return what each of several projections makes of one source; see project()."""
    weights = [each.weight for each in found if each.weight is not None]
    biases = [each.bias for each in found if each.weight is not None]
    sides = [adapter.side() for each in found for adapter in each.adapters]
    done: list[Tensor] = []
    if weights or sides:
        done += linears(source, weights, biases, keep, kept, sides=sides)
    own, products = done[: len(weights)], done[len(weights) :]
    del done
    results = []
    for each in found:
        base = each.base(tensor_of(source)) if each.weight is None else own.pop(0)
        if each.adapters:
            base = adapted(base, each.adapters, [products.pop(0) for _ in each.adapters])
        results.append(base)
    return results


def behind(
    found: Projection,
    read: Callable[[Behind], tuple[Tensor, Tensor | None]],
    residual: Tensor | None = None,
) -> Tensor | None:
    """Return what a projection makes of a value that an operator makes, plus a residual.

    `read` calls the operator with what is to read its value. None: it has room for one adapter's
    weight, and those of the projection cannot be joined.
    """
    sides = [adapter.side() for adapter in found.adapters]
    if not can_join(sides):
        return None
    added = None if found.weight is None else residual
    y, products = read(Behind(found.weight, found.bias, added, joined(sides)))
    if found.weight is None:
        y = found.base(y)
    if products is not None:
        ranks = [len(side.weight) for side in sides]
        y = adapted(y, found.adapters, products.split(ranks, -1))
    return y if residual is None or added is residual else residual + y


def adapted(base: Tensor, adapters: Sequence[Adapter], products: Sequence[Tensor]) -> Tensor:
    """Return a projection's result, from that of its base and the products of first weights."""
    for adapter, product in zip(adapters, products, strict=True):
        base = add_low_rank(base, product, adapter.second, adapter.bias, adapter.scale)
    return base


def probability_of(dropout: Any) -> float | None:
    """Return the probability of a Dropout, 0 of what does nothing; None if it is neither."""
    if type(dropout) is nn.Identity and untouched(dropout):
        return 0.0
    if type(dropout) is not nn.Dropout or not untouched(dropout):
        return None
    return float(dropout.p) if dropout.training else 0.0


def plain_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor of no subclass: neither quantised nor distributed."""
    return type(value) in PLAIN


# -- LoRA ------------------------------------------------------------------------------------------


def _adapters_of(module: Any) -> tuple[Adapter, ...] | str:
    """Return the adapters that a call of a LoRA computes now, or why they are not understood."""
    if class_name(type(module)) not in LORAS or not hasattr(module, "base_layer"):
        return "it is no plain Linear"
    if not untouched(module):
        return "it has hooks or another forward"
    try:
        return _active_adapters_of(module)
    except (AttributeError, KeyError, TypeError):  # a part is not there, or is of another kind
        return "it has not the parts of a known release"


def _active_adapters_of(module: Any) -> tuple[Adapter, ...] | str:
    if module.disable_adapters:
        # A call takes the adapters out of the weight.
        return "it is merged and disabled" if module.merged else ()
    if module.merged:
        return ()
    if not getattr(module, "cast_input_dtype_enabled", True):
        return "its adapters' input is not cast"
    found = [_adapter_of(module, name) for name in module.active_adapters if name in module.lora_A]
    wrong = [each for each in found if isinstance(each, str)]
    return wrong[0] if wrong else tuple([each for each in found if not isinstance(each, str)])


def _adapter_of(module: Any, name: str) -> Adapter | str:
    said = f"its adapter {name!r}"
    if not hasattr(module, "lora_variant"):  # of releases that have one, and no table of them
        if module.use_dora[name]:
            return f"{said} scales directions (DoRA)"
    elif name in module.lora_variant:
        return f"{said} is a {type(module.lora_variant[name]).__name__}"
    first, second = terms_of(module.lora_A[name]), terms_of(module.lora_B[name])
    if first is None or second is None or first[1] is not None:
        return f"{said} is not of two plain Linears"
    if first[0].dtype != second[0].dtype:
        return f"{said} is of {first[0].dtype} and {second[0].dtype}"
    p, scale = probability_of(module.lora_dropout[name]), module.scaling[name]
    if p is None:
        return f"{said} has a {type(module.lora_dropout[name]).__name__} before it"
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        return f"{said} is scaled by a {type(scale).__name__}"
    return Adapter(first[0], second[0], second[1], float(scale), p)
