"""accelerate around and below what vramx changed.

Whole models that they train are in test_patch_libraries_table.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from patch_tools import OPTIONS, Plain, train

import vramx


@pytest.fixture
def accelerate() -> Any:
    return pytest.importorskip("accelerate")


def test_prepared_model_gets_new_options_and_keeps_them_unwrapped(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    net = accelerator.prepare(vramx.compressed_activations(Plain(), **OPTIONS))
    train(net)
    assert vramx.compression_stats(net).packed.tensors > 0
    vramx.compressed_activations(net, level="int4", **OPTIONS)
    net = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    train(net)
    assert vramx.compression_stats(net).packed.tensors > 0
    assert [row.done for row in vramx.report(net).rows] == ["packed in int4"]
    vramx.restore(net)
    assert "forward" not in vars(net)


@pytest.mark.parametrize("first", ["ours", "accelerate"])
@pytest.mark.parametrize("gone_first", ["ours", "accelerate"])
def test_hooked_module(accelerate: Any, first: str, gone_first: str) -> None:
    hooks = accelerate.hooks
    block = Plain()
    steps = [
        lambda: vramx.compressed_activations(block, **OPTIONS),
        lambda: hooks.add_hook_to_module(block, hooks.ModelHook()),
    ]
    for step in steps if first == "ours" else reversed(steps):
        step()
    twin = copy.deepcopy(block)
    train(twin)
    assert vramx.compression_stats(twin).packed.tensors > 0
    assert all(p.grad is None for p in block.parameters())
    if gone_first == "ours":
        assert len(vramx.restore(block)) == 1
        train(block)
        hooks.remove_hook_from_module(block)
    else:
        hooks.remove_hook_from_module(block)
        train(block)
        assert vramx.compression_stats(block).packed.tensors > 0
        assert len(vramx.restore(block)) == 1
    train(block)
    vramx.restore(block)
    assert type(block) is Plain
    assert block.forward.__func__ is Plain.forward
