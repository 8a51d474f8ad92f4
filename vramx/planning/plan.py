"""plan(): measure a model once, choose what each block keeps so that a step fits a budget, verify.

Here is what a user calls. chooser.py chooses, bench.py measures, planned.py is the result. Not
thread-safe; takes seconds to a minute, most of it the compilation of kernels that were not used
before.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from vramx.errors import InvalidValueError, refused
from vramx.planning.agreement import agreeing
from vramx.planning.budget import Budget, budget_bytes_of, device_of
from vramx.planning.chooser import Chooser
from vramx.planning.loop import Added, loop_of
from vramx.planning.planned import Plan
from vramx.planning.program import check_has_memory
from vramx.planning.steps import check_sample
from vramx.sizes import parse_size


def plan(
    model: nn.Module,
    sample: Any,
    budget: Budget = None,
    *,
    levels: str | Collection[str] | None = None,
    reserve: int | str = 0,
    optimizer: Any = None,
    gradients: str | None = None,
) -> Plan:
    """Choose what each repeated block of a model keeps, for the fastest step that fits a budget.

    A model in which nothing repeats has its parts for blocks. Those that vramx.optimize knows can
    have each of its levels; others can be left, have what they save packed ("int8", "int4") or be
    recomputed from their input ("recompute_all"), packed where what they do is smooth. On a GPU,
    either can be moved to the host ("int8_offload", "recompute_all_offload"). The loss of a
    language model makes no logits under any of them, as vramx.optimize has it. The model is as
    before when this returns; apply() changes it. Plan before torch.compile wraps the model. Where
    torch.distributed is initialised all processes call it together, with the model that DDP or
    fully_shard() made: each number is the largest of any process, all of them have the same plan,
    and an error of one is an error of all.

    Args:
        model: on the device where it is to be trained. It is measured in training mode.
        sample: a batch as large as those of the training: a tensor, a tuple of arguments, a mapping
            of keyword arguments, or a function of the model that returns the loss. Of a result that
            is no loss, the loss is the mean of its logits or of its first tensor. Of a
            LightningModule it is a batch on the model's device, for its training_step, without a
            trainer.
        budget: the most that a step may have allocated: bytes, or text such as "24GiB", or the
            fraction of the GPU's memory as a float; None is the fastest step, and "smallest" the
            one of the smallest peak.
        levels: the words to choose among, or one; "all" is all; None is all but "int4", which has
            the noisiest gradients and is taken where nothing else fits the budget, as the plan then
            says. What recomputes a block is left out where the block does not do the same again.
        reserve: bytes to leave free of the budget for what vramx cannot know of.
        optimizer: the torch.optim.Optimizer of the training, or several of them. The bytes of
            states that do not exist yet are added, and the peak of its own step counts. Both are
            measured, by steps of copies of it for copies of one parameter of each shape. Of states
            that wait on the host (offload_optimizer) what is on its way counts, and apply() has as
            many stay on the device as the budget has room for: the link is measured, and blocks
            keep less where that makes a step faster. None is what a LightningModule's
            configure_optimizers() makes, and for other models none.
        gradients: "fresh": they are set to None before each step, as zero_grad() does;
            "accumulated": they are there during the whole step, as with accumulation over steps, or
            zero_grad(set_to_none=False); "late": they are set to None between forward and
            backward, as Lightning does; "stepped": a step in backward uses each as it comes, and
            no two of them are there. Plan before the hooks for that are registered, but for those
            of offload_optimizer(in_backward=True), which say "stepped" of themselves. None is
            "late" for a LightningModule and "fresh" for other models.

    Returns:
        A Plan, whose step was run and stayed within the budget; on a GPU with 2 MiB and 0.25 % to
        spare, which what torch's allocator has cached may take.

    Raises:
        InvalidValueError: a value is not accepted; no arrangement fits the budget (the text names
            the smallest budget); the model has no modules in it or cannot be planned as it is.
        torch.OutOfMemoryError: a step is too much for the device however little it keeps.

    Memory: a step of the model as it is, which may run out of memory; then at most a step that
        keeps least, or one block more than nothing; then the chosen step.
    Sync: waits for the device.
    Error bound: the peak is of steps that were run, forward and backward; the optimizer's step is
        taken for a parameter at a time, or for all at once where two at once take twice as much.

    Example:
        >>> import torch, vramx
        >>> blocks = (torch.nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3))
        >>> plan = vramx.plan(torch.nn.Sequential(*blocks), torch.ones(4, 2, 16), "1MiB")
        >>> plan.measured_bytes <= plan.budget_bytes
        True
    """
    with agreeing(model) as agreement:
        with agreement.phase("reading its arguments"):
            _check(model, sample, budget)
            loop, said = loop_of(model, optimizer, gradients)
            added = Added(loop, parse_size(reserve))
            chooser = Chooser(model, levels, added, [*said, *agreement.said])
        choice = chooser.choose_together(sample, budget, agreement)
    return Plan(chooser, choice)


_FSDP1 = "FullyShardedDataParallel"


def _check(model: nn.Module, sample: Any, budget: Budget) -> None:
    """Raise for a mistake before anything is measured."""
    if not isinstance(model, nn.Module):
        raise refused("model", model, "is a torch.nn.Module")
    if hasattr(model, "_orig_mod"):
        raise InvalidValueError(
            "model is compiled already, so that its blocks are not called; plan the model that "
            "torch.compile() was given, and compile afterwards"
        )
    if any(base.__name__ == _FSDP1 for part in model.modules() for base in type(part).mro()):
        raise InvalidValueError(
            f"model has parts under {_FSDP1} (FSDP1), which cannot be run by themselves, as a plan "
            "runs them; shard with torch.distributed.fsdp.fully_shard (FSDP2), or plan before"
        )
    check_has_memory([model])
    script = torch.jit.ScriptModule
    name = next((name for name, part in model.named_modules() if isinstance(part, script)), None)
    if name is not None:
        raise InvalidValueError(
            f"{name or 'model'} is of TorchScript, whose buffers the steps of a plan could not put "
            "back; plan the model before it is compiled"
        )
    budget_bytes_of(budget, device_of(model))
    check_sample(model, sample)
