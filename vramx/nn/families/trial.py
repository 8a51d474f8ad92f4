"""Whether a family computes what the class of the installed release does: both are run, once.

A library's release may compute something else under the same names. So a module is swapped only
after a small one of its class, made by the library and run on the CPU, has been computed both ways
with results and gradients that differ by rounding alone. A class is tried once for all modules that
are made of the same classes. Changes no random state. Some hundredths of a second a class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vramx.errors import cause
from vramx.nn.families.attention import attention_is_torchs
from vramx.nn.families.questions import class_name, functions_of
from vramx.nn.families.small import randomised
from vramx.nn.families.swap import Fused, Settings, swap
from vramx.nn.families.verify import EXACT, difference
from vramx.patch.module import original_class
from vramx.patch.torch_functions import OF_MODULES, replaced
from vramx.patch.watching import has_other_hooks

_results: dict[Any, str | None] = {}


def why_not(module: nn.Module, family: type[Fused]) -> str | None:
    """Return why a module cannot be swapped, for all that is known of its class; None: it can.

    Example:
        >>> from vramx.nn.families.encoder import EncoderLayer
        >>> why_not(nn.TransformerEncoderLayer(8, 2), EncoderLayer) is None
        True
    """
    found = family.why_not(module)
    if found is not None:
        return found
    name = replaced(OF_MODULES)
    if name is not None:
        return f"torch.nn.functional.{name} is not torch's own"
    key = (family, _likeness(module), attention_is_torchs(), has_other_hooks())
    if key not in _results:
        _results[key] = _tried(module, family)
    return _results[key]


def _likeness(module: nn.Module) -> tuple[Any, ...]:
    """Return what modules have in common that compute the same way."""
    configs = [getattr(part, "config", None) for part in module.modules()]
    words = frozenset(getattr(config, "_attn_implementation", None) for config in configs)
    parts = [(name, original_class(part)) for name, part in module.named_modules()]
    functions = {cls: functions_of(cls)[1] for cls in dict.fromkeys(cls for _, cls in parts)}
    return (*parts, *functions.items(), words)


def _tried(module: Any, family: type[Fused]) -> str | None:
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), _as_usual():
            small, calls = family.small(module)
            randomised(small)
            swap(small, family, Settings("keep", EXACT))
            return next(filter(None, (_compared(small, call) for call in calls)), None)
    except Exception as error:  # of a library whose classes are made otherwise, say
        return f"a small one of its class cannot be tried: {cause(error)}"


def _compared(small: Any, call: dict[str, Any]) -> str | None:
    if not small.vramx_understands(call):
        return f"no call of a small {class_name(type(small))} is understood"
    found = difference(small, call)
    return None if found is None else f"of a small one of its class, {found}"


def _as_usual() -> Any:
    return torch.autocast("cpu", enabled=False)
