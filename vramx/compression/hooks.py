"""compress(): the context in which what torch saves for backward is kept in fewer bits.

Entering pushes one pair of saved-tensor hooks and one torch function mode on this thread; leaving
pops them. Nothing global is patched. Other threads have contexts of their own. Entering costs some
ten microseconds; what a saved tensor costs is said in session.py.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

import torch
from torch.overrides import _get_current_function_mode

from vramx.compression import enclosing
from vramx.compression.asked import options_of
from vramx.compression.codec import random
from vramx.compression.compiler import run_uncompiled
from vramx.compression.config import Compression
from vramx.compression.derivatives import Derivatives, Unpacking
from vramx.compression.notices import explain
from vramx.compression.policy.operations import OperationMode
from vramx.compression.saved import Codec
from vramx.compression.session import PlainCodec, Session
from vramx.compression.stats import CompressionStats
from vramx.errors import VramxError, refused, warn_once

# Where a context is taken for a decorator, or for what changes a model.
_INSTEAD = (
    "is `with vramx.compress():` around a forward pass; vramx.compressed_activations() changes a "
    "model, a class or a function"
)


class CompressionContext:
    """What compress() returns: enter it around a forward pass, as often as needed.

    It may be entered again while it is entered, and on several threads; `stats` sums over all.
    """

    def __init__(self, options: Compression) -> None:
        self.options = options
        self.stats = CompressionStats()
        self._derivatives = Derivatives(packs=options.packs)
        self._entered = _Entered()

    def __call__(self, target: object) -> NoReturn:
        """Refuse to decorate.

        Raises:
            InvalidValueError: always; compressed_activations() decorates.
        """
        raise refused("compress() as a decorator of", target, _INSTEAD)

    @run_uncompiled
    def __enter__(self) -> CompressionStats:
        self.enter(None)
        return self.stats

    @run_uncompiled
    def enter(self, module: torch.nn.Module | None) -> None:
        """Push the hooks, unless there is nothing to do; `module` is whose forward runs.

        A module that is not training is left alone: what is asked of it then are its values, and
        gradients that are such values, rather than a step.
        """
        if self.options.offload:
            _collect()
        active = None
        idle = module is not None and not module.training
        if not idle and torch.is_grad_enabled() and _may_push(self.options):
            unpacking = Unpacking(self._derivatives, module)
            active = _Active(self._session(module), unpacking)
        entered = self._entered.stack
        depth = len(entered)
        try:
            entered.append(active)
            if active is not None:
                active.push()
        except BaseException:  # an interrupt, of what will not be left
            del entered[depth:]
            raise

    def _session(self, module: torch.nn.Module | None) -> tuple[Session, OperationMode]:
        mode = OperationMode()
        codec = _codec_of(self.options, self._entered)
        only_weights = self._derivatives.higher
        session = Session(self.options, self.stats, mode, module, codec, only_weights=only_weights)
        return session, mode

    @run_uncompiled
    def __exit__(self, *error: object) -> None:
        if not self._entered.stack:
            raise VramxError(_NOT_ENTERED)
        active = self._entered.stack.pop()
        if active is not None:
            active.pop()
            for each in error:
                explain(each)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompressionContext, (self.options,)


class _Entered(threading.local):
    """The entries of one context on a thread, and the noise of its steps if it is to repeat."""

    def __init__(self) -> None:
        self.stack: list[_Active | None] = []
        self.steps = 0
        self._streams: random.Streams | None = None

    def next_streams(self) -> random.Streams:
        """Return the streams of noise of the next step."""
        if self._streams is None:
            self._streams = random.Streams()
        self._streams.restart(self.steps)
        self.steps += 1
        return self._streams


def _codec_of(options: Compression, entered: _Entered) -> Codec:
    streams = entered.next_streams() if options.deterministic else None
    if options.offload:
        from vramx.compression.offload import offload  # it imports threads and pinned memory

        return offload.codec(options, streams)
    return _PLAIN_CODEC if streams is None else PlainCodec(streams)


def _collect() -> None:
    """Have what a failed step was moving freed, before an evaluation too."""
    if offload := sys.modules.get("vramx.compression.offload.offload"):
        offload.collect()


_PLAIN_CODEC = PlainCodec()
_IN_CHECKPOINT = (
    "vramx.compress() inside torch.utils.checkpoint does nothing: a checkpoint keeps only the "
    "inputs of its region. To compress those, use vramx.checkpoint"
)
_IN_MUTATION = (
    "vramx.compress() inside torch.autograd.graph.allow_mutation_on_saved_tensors() packs nothing: "
    "that keeps copies of what is written into, and hooks within it would keep it from that"
)


_NOT_ENTERED = (
    "a vramx.compress() is left that was not entered on this thread, as by a generator that begins "
    "on one thread and ends on another: the thread that entered it packs until it leaves it"
)


class _Active:
    """One pair of hooks and one mode on this thread's stacks."""

    def __init__(self, parts: tuple[Session, OperationMode], unpacking: Unpacking) -> None:
        session, self._mode = parts
        self._pack = session.pack
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpacking.unpack)

    def push(self) -> None:
        try:
            self._hooks.__enter__()
            enclosing.note(self._pack)
            self._mode.__enter__()
        except BaseException:
            self._take_off()
            raise

    def pop(self) -> None:
        try:
            if torch._C._len_torch_function_stack():  # else an interrupt of torch has taken it off
                self._mode.__exit__(None, None, None)
            enclosing.forget()
            self._hooks.__exit__()
        except BaseException:
            self._take_off()
            raise

    def _take_off(self) -> None:
        """Leave nothing that would pack all that follows: an interrupt may come at any point."""
        if _get_current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)
        is_on = enclosing.top_hook() is self._pack
        enclosing.forget_hook(self._pack)
        if is_on:
            self._hooks.__exit__()


def _hooks_are_enabled() -> bool:
    """Whether torch accepts hooks here; torch.func's transforms and users can forbid them."""
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return enabled


def _may_push(options: Compression) -> bool:
    """Whether hooks may be pushed here and now, and would do something."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state():
        return False
    if not _hooks_are_enabled() or torch._C._are_functorch_transforms_active():
        return False  # tensors of torch.func's transforms stand for others
    if enclosing.in_checkpoint():
        # Kept here, the checkpoint would keep everything and recompute nothing.
        if options.packs:
            warn_once(_IN_CHECKPOINT, stacklevel=4)
        return False
    if getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False):
        if options.packs:
            warn_once(_IN_MUTATION, stacklevel=4)
        return False
    return options.packs or _is_ours(enclosing.top_hook())


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), Session)


@run_uncompiled
def compress(level: str | Compression = "int8", **options: Any) -> CompressionContext:
    """Return a context in which what backward needs is kept in fewer bits.

    Enter it around the forward pass and leave the loss outside; backward may run anywhere.
    Parameters, integers, small tensors and what the policy keeps stay as they are; everything else
    is packed once, however many operations saved it. Contexts nest: the innermost decides, and
    `compress("keep")` opts out. Under no_grad, read on entry, it does nothing. The region of
    an enclosing torch.utils.checkpoint is left to it.

    What is not known is kept, and named in one warning: autograd.Functions and operators of other
    libraries (third_party.py lists the exceptions), TorchScript, what a checkpoint computes with
    again, and what a torch.compile'd callable saves (compressed_graphs() packs within its graph).
    The policy may name one's own: {"MyFunction": "int8"}, or {"MyFunction:0": "int8"} for an
    argument. Data of the program's own that no gradient is asked of, such as the batch, is kept by
    reference.

    Of torch's operations those are packed whose backward is smooth in what it saves (exactness.py
    lists them). Queries and keys of attention that is written out cannot be told from other factors
    of a matmul, and are packed: call scaled_dot_product_attention, which keeps them, or give the
    policy {"matmul": "keep"}. Of an attention without dropout the value is packed, and the result
    is computed again in backward.

    Args:
        level: "int8" or "int4"; "keep" opts out; or a Compression.
        **options: its other fields.

    Returns:
        A context manager that gives CompressionStats.

    Raises:
        InvalidValueError: an option has no such name or value, or the policy names no operation.

    Memory: 1.047 bytes an element at int8; in backward one decoded tensor at a time, and one a
    device that is kept for the next that needs it. A tensor that the caller holds until backward
    takes its packed bytes in addition.
    Sync: none; the first use of a device waits for it once.
    A backward pass with create_graph=True is warned of once, and from the next forward on only
    inputs of layers with weights are packed: no gradient of a gradient reads those.
    Error bound: codec.py states it for one tensor. With stochastic rounding the gradient of a layer
    that is linear in what it saved is unbiased.

    A change in place of a packed tensor is no error and does not change the gradient; of one that
    is kept it raises, as in torch. Writes through `tensor.data` are no error in either: of packed
    data the operations before such a write have the old values, and those after it the new ones.

    Example:
        >>> layer = torch.nn.Linear(64, 64)
        >>> x = torch.randn(64, 64, requires_grad=True)
        >>> with compress(min_bytes=0) as stats:
        ...     y = layer(layer(x))
        >>> y.sum().backward()
        >>> stats.packed.tensors
        1
    """
    if callable(level):  # a model, or a function below `@compress`
        raise refused("level", level, _INSTEAD)
    return CompressionContext(options_of(level, options))
