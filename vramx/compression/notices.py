"""What compression says: which operation it does not know, once, and what to do about an error.

Thread-safe; a set look-up where a thing has been said.
"""

from __future__ import annotations

from vramx.compression.policy.calls import GRAPH, UNKNOWN, Operation
from vramx.errors import warn_once

# There is a better way to pack what these save than a policy that names them.
_WAYS = {
    GRAPH: "a graph of torch.compile; vramx.compressed_graphs() around the call packs within it",
    "checkpoint": "a checkpoint's inputs are computed with again; vramx.checkpoint() packs them",
    "CheckpointFunction": "a checkpoint's inputs are computed with again; vramx.checkpoint() "
    "packs them",
    UNKNOWN: "TorchScript, a backward pass within, C++ that is no operator of torch, or, from "
    "torch 2.14 on, an autograd.Function whose call does not name it; it can be kept only",
}


# Of torch's words where a transform of torch.func meets hooks.
_HOOKS = "support saved tensor hooks"


def explain(error: object) -> None:
    """Add to torch's error of a transform that ran into our hooks what is to be done about it."""
    if not isinstance(error, RuntimeError) or _HOOKS not in str(error):
        return
    # Python 3.10 has no notes.
    if hasattr(error, "add_note") and not hasattr(error, "__notes__"):
        error.add_note(
            "vramx packs and recomputes by such hooks: leave modules out whose forward calls "
            "torch.func.grad, vjp, jacrev or hessian, and decorate or checkpoint the others"
        )


def tell_of_unknown(operation: Operation) -> None:
    """Name an operation whose tensors are kept because nothing is known of its backward."""
    name = operation.name
    way, whose = _WAYS.get(name), ""
    if way is None:
        whose = f" of {operation.library}"  # operators of several libraries may be a `forward`
        way = f'a policy such as {{"{name}": "int8"}}'
        if not operation.untold:
            way += f', or {{"{name}:0": "int8"}} for its first argument,'
        way += " packs what its backward is linear or smooth in"
        if operation.untold:  # from torch 2.14 on
            way += "; torch does not show its arguments, and one for some of them has no effect"
    called = "an operation that has no name" if name == UNKNOWN else f"{name}{whose}"
    text = f"{called} is not known to compression, and what it saves is kept exactly: {way}"
    warn_once(text, about=f"{operation.library}.{name}")
