"""vramx.optimize: a part that is replaced later by one of another class is called as it is.

By a subclass with a forward of its own, by an adapter's wrapper, or, as all batch norms of a model
may be, by another norm. What a block then computes is what the original with that part does.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from optimize_tools import EVERY_FAMILY, assert_computes, family, optimised_copy
from torch import Tensor, nn

# Of each family some parts, by the end of their names.
PARTS = {
    "llama": ("self_attn", "mlp", "self_attn.q_proj", "post_attention_layernorm", "mlp.act_fn"),
    "qwen3": ("self_attn", "self_attn.q_norm"),
    "gemma": ("self_attn", "input_layernorm"),
    "gpt2": ("attn", "mlp", "mlp.c_fc", "ln_2", "mlp.act"),
    "bert": ("attention", "attention.self", "attention.output", "intermediate", "output"),
    "vit": ("attention", "mlp", "layernorm_after", "mlp.activation_fn"),
    "timm_vit": ("attn", "mlp", "norm1", "ls1", "attn.q_norm"),
    "encoder": ("self_attn", "linear1", "norm2"),
    "convnext": ("mlp", "norm", "conv_dw"),
    "resnet": ("conv2", "bn2", "relu"),
}
CASES = [(name, part) for name in EVERY_FAMILY for part in PARTS.get(name, ())]


def doubled(part: nn.Module) -> nn.Module:
    """Return a part of a class of the program's own, which gives twice of what it did."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = super(cls, self).forward(*args, **kwargs)
        if isinstance(found, Tensor):
            return found * 2
        return (found[0] * 2, *found[1:])

    cls = type(f"Doubled{type(part).__name__}", (type(part),), {"forward": forward})
    new = copy.copy(part)
    new.__class__ = cls
    return new


def replace(model: nn.Module, part: str) -> int:
    """Replace a part of every block; return how many there were."""
    found = [name for name, _ in model.named_modules() if name.endswith(f".{part}")]
    for name in found:
        outer, _, own = name.rpartition(".")
        setattr(model.get_submodule(outer), own, doubled(model.get_submodule(name)))
    return len(found)


@pytest.mark.filterwarnings("ignore:.*optimize")
@pytest.mark.parametrize("level", ["keep", "recompute_all"])
@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_replaced_part_is_called(name: str, part: str, level: str) -> None:
    original, inputs = family(name)
    model = optimised_copy(original, level)
    assert replace(original, part) == replace(model, part) > 0
    assert_computes(model, original, inputs, level)
