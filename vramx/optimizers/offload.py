"""offload_optimizer: the states of any optimizer wait in pinned host memory.

The optimizer stays the object that it is, of a subclass of its class, made once for each, that
bears its name. Its step goes through buckets of parameters (stream.py): the class's own step is
called for each with the gradients of that bucket alone, so what is computed is what it computes.
Not thread-safe, as no optimizer is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from vramx.compression.offload import offload
from vramx.errors import InvalidValueError, OffloadError, brief
from vramx.optimizers import separable
from vramx.optimizers.copies import HOLDER, ORIGINAL, unwrapped
from vramx.optimizers.options import Options, check_alone, check_wrappers
from vramx.optimizers.rounds import Rounds
from vramx.optimizers.states import apart, mapped, size_bytes
from vramx.patch.change import Restorable
from vramx.patch.of_classes import made_of
from vramx.sizes import parse_size

_LEAST = "64KiB"
# What is returned is what was given, wrappers included.
Given = TypeVar("Given", bound=Optimizer)


def offload_optimizer(
    optimizer: Given,
    *,
    in_backward: bool = False,
    bucket: int | str | None = None,
    least: int | str = _LEAST,
    keep: int | str | None = None,
) -> Given:
    """Let an optimizer's states wait in pinned host memory between its steps.

    They stream through the GPU around the step of their parameters, some at a time, in both
    directions at once. What a step computes is what it was, to the bit; schedulers, step hooks,
    GradScaler, `state_dict()` and `load_state_dict()` go on working. Loading puts the states on the
    host without having all of them on the GPU, unless the optimizer's class loads them in a way of
    its own. Parameters and states may be replaced or changed between two steps. An error in a step
    loses nothing: each parameter and its states are as before or after.

    With `in_backward` a bucket is stepped as soon as backward has all its gradients, which are let
    go of then: copies and steps are hidden behind backward, and there is never more than a few
    buckets of gradients. `optimizer.step()` steps the rest and ends the round. That excludes what
    needs all gradients at once, or more than one backward a step: clipping by the norm, GradScaler,
    accumulation and training on several GPUs, which raise.

    Args:
        optimizer: any that treats each parameter by itself, as those of torch (but LBFGS), torchao
            and bitsandbytes do; another one is tried on a small model first. It may be wrapped, as
            by accelerate. Its parameters may be DTensors, as of FSDP2.
        in_backward: step each bucket in backward.
        bucket: bytes of the parameters that are stepped together. None is those of the largest
            one, for which there is room anyway, between 64 and 256 MiB.
        least: state tensors below this stay on the GPU, as do counters.
        keep: bytes of states that stay on each GPU, or text such as "3GiB": those of the first
            parameters, in buckets. What does not travel need not be waited for; vramx.plan gives
            them what its budget leaves. None is none. Of an optimizer whose states wait already it
            changes this, and None leaves it.

    Returns:
        The same optimizer. vramx.restore(it) brings the states back for good.

    Raises:
        InvalidValueError: it is no optimizer, does not treat each parameter by itself, or its step
            was replaced by a function that is not known.
        OffloadError: with `in_backward`, there are other processes, parameters are on several
            devices, a wrapper is not known to do no more than step, or a second gradient comes
            before `step()`.

    Memory: during a step, and with `in_backward` from the first one on, three times the states of
        the largest bucket, on the GPU, and what is kept there; on the host what the others take, up
        to half of what this process may have: what is more than that stays on the GPU, and a
        warning says so.
    Sync: none, but where states are read: `optimizer.state`, state_dict(), pickling and restore()
        wait for the copies.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = offload_optimizer(torch.optim.AdamW(model.parameters()))
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
    """
    inner = unwrapped(optimizer)
    if not isinstance(inner, Optimizer):
        raise InvalidValueError(f"{brief(optimizer)} is no torch.optim.Optimizer")
    keep_bytes = None if keep is None else _bytes("keep", keep)
    if HOLDER in vars(inner):
        if keep_bytes is not None:
            vars(inner)[HOLDER].keep(inner, keep_bytes)
        return optimizer
    bucket_bytes = None if bucket is None else _bytes("bucket", bucket)
    options = Options(bucket_bytes, _bytes("least", least), in_backward, keep_bytes or 0)
    if in_backward:
        check_alone()
        check_wrappers(optimizer)
    separable.check(inner)
    _take_over(inner, options)
    return optimizer


# --- the class ------------------------------------------------------------------------------------


class _Offloading(Restorable):
    """What our subclasses have of their own. `_vramx_original` is the class that each is of."""

    __slots__ = ()

    _vramx_original: Any
    _vramx_rounds: Rounds

    @property
    def state(self) -> Any:
        """The optimizer's states. What is asked between two steps waits for the copies."""
        self._vramx_rounds.settle_between_steps()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._vramx_rounds.discard(leaves_zeros=not set_to_none)
        self._vramx_original.zero_grad(self, set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        self._vramx_rounds.settle()
        return apart(self._vramx_original.state_dict(self))  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._vramx_rounds.settle()
        load = self._vramx_original.load_state_dict
        if load is Optimizer.load_state_dict:
            _load_on_host(self, load, state_dict)
        else:
            load(self, state_dict)
        self._vramx_rounds.adopt(self, is_anywhere=True)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._vramx_rounds.settle()
        reduced: Any = self._vramx_original.__reduce_ex__(self, max(int(protocol), 2))
        make, args, state, *others = reduced
        args = tuple(self._vramx_original if value is type(self) else value for value in args)
        state = {key: value for key, value in state.items() if key != HOLDER}
        state["state"] = apart(self.__dict__["state"])
        return _make, (make, args, self._vramx_rounds.options), state, *others

    def vramx_done(self) -> tuple[str, str]:
        return "states wait on the host", str(self._vramx_rounds)

    def vramx_restore(self) -> None:
        self._vramx_rounds.undo()
        self.__class__ = self._vramx_original
        step_before = self.__dict__.pop(HOLDER).step_before
        if step_before is not None:
            self.__dict__["step"] = step_before


_OVERRIDDEN = ("state", "zero_grad", "state_dict", "load_state_dict", "__reduce_ex__")


def _make(make: Callable[..., Any], args: tuple[Any, ...], options: Options) -> Any:
    """Make a copy, whose states, once it has them, go to the host at its first step."""
    optimizer = make(*args)
    cls: Any = type(optimizer)
    optimizer.__class__ = _class_of(cls)
    optimizer.__dict__[HOLDER] = Rounds(options)
    return optimizer


@made_of
def _class_of(original: Any) -> Any:
    """Return our subclass of an optimizer's class.

    The class comes first among the bases and nothing is added to instances, for only then may any
    instance of that class become one of ours; what ours do otherwise stands in the subclass itself.
    """

    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # what schedulers look at
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise OffloadError("an optimizer whose states wait on the host cannot be captured")
        inner = separable.inner_step(original)  # a program may replace it at any time
        self._vramx_rounds.step(self, lambda: inner(self, *args, **kwargs))
        return loss

    hooked: Any = Optimizer.profile_hook_step(functools.wraps(separable.inner_step(original))(step))
    # torch's mark, that hooks are around it, and its schedulers', that the calls are counted.
    hooked.hooked = hooked._wrapped_by_lr_sched = True
    names = {name: value for name, value in vars(_Offloading).items() if name in _OVERRIDDEN} | {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        ORIGINAL: original,
        "__slots__": (),
        "step": hooked,
    }
    return type(original)(original.__name__, (original, _Offloading), names)


def _take_over(optimizer: Optimizer, options: Options) -> None:
    own: Any = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise InvalidValueError(
            f"{brief(optimizer)} has a step of its own, {brief(own)}, which is not known: "
            "offload the optimizer before that is put there"
        )
    rounds = Rounds(options, own)
    cls: Any = type(optimizer)
    vars(optimizer)[HOLDER] = rounds
    try:
        optimizer.__class__ = _class_of(cls)
    except TypeError as error:  # as of a class whose instances have slots
        del vars(optimizer)[HOLDER]
        raise InvalidValueError(
            f"{cls.__module__}.{cls.__qualname__} has instances that cannot be of another class: "
            f"{error}"
        ) from error
    try:
        # What an optimizer has on the host of itself is where it wants it.
        rounds.adopt(optimizer, is_anywhere=False)
    except BaseException:
        optimizer.__class__ = cls
        del vars(optimizer)[HOLDER]
        raise
    vars(optimizer).pop("step", None)  # ours counts for the scheduler, too


def _load_on_host(optimizer: Any, load: Callable[..., None], state_dict: dict[str, Any]) -> None:
    """Load as torch does, with stand-ins on the host for the parameters that are not there."""
    groups = optimizer.param_groups
    own = [list(group["params"]) for group in groups]

    # A subclass, such as a DTensor, may have states that only it can move.
    def stand_in(parameter: Tensor) -> Tensor:
        is_plain = type(parameter) in (Tensor, torch.nn.Parameter)
        if not is_plain or offload.link_of(parameter.device) is None:
            return parameter
        return torch.empty(0, dtype=parameter.dtype, device="cpu")

    stands = [[stand_in(parameter) for parameter in parameters] for parameters in own]
    try:
        for group, parameters in zip(groups, stands, strict=True):
            group["params"] = parameters
        load(optimizer, state_dict)
    finally:
        groups = optimizer.param_groups
        for group, parameters in zip(groups, own, strict=True):
            group["params"] = parameters
    least_bytes = optimizer._vramx_rounds.options.least_bytes
    for group, parameters, standing in zip(groups, own, stands, strict=True):
        for parameter, stand in zip(parameters, standing, strict=True):
            if stand is not parameter and stand in optimizer.state:
                values = optimizer.state.pop(stand)
                optimizer.state[parameter] = _small_on(parameter.device, values, group, least_bytes)


def _small_on(
    device: torch.device, values: dict[Any, Any], group: dict[str, Any], least_bytes: int
) -> dict[Any, Any]:
    """Return a parameter's states with those that never wait where torch has them."""
    counts_on_device = group.get("fused") or group.get("capturable")

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device) if size_bytes(tensor) < least_bytes else tensor

    return {
        key: value if key == "step" and not counts_on_device else mapped(value, moved)
        for key, value in values.items()
    }


def _bytes(name: str, size: int | str) -> int:
    try:
        return parse_size(size)
    except InvalidValueError as error:
        raise InvalidValueError(f"{name}: {error}") from None
