"""The options that a caller asks for: that they exist, and the operations that a policy names.

A name that is misspelt would do nothing. Known are torch's functions and methods, every operator
that is registered, also by other libraries, and every autograd.Function there is by now. Looking
them all up takes a tenth of a second, once for each policy that names what the default does not;
any thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import torch

from vramx.compression.config import DEFAULT_POLICY, LEVELS, Compression
from vramx.compression.policy.calls import GRAPH
from vramx.compression.policy.operations import operation_name
from vramx.errors import InvalidValueError, refused

# Of an error.
_MOST_NAMES = 3


def options_of(level: object, changes: Mapping[str, Any], name: str = "level") -> Compression:
    """Return the options that a level means, or given ones, with changes of fields.

    Raises:
        InvalidValueError: a field has no such name or value, or the policy names no operation.

    Example:
        >>> options_of("int4", {"min_bytes": "1KiB"}).min_bytes
        1024
    """
    if not isinstance(level, (str, Compression)):
        raise refused(name, level, LEVELS, "a vramx.Compression")
    accepted = [field.name for field in fields(Compression)]
    unknown = next((name for name in changes if name not in accepted), None)
    if unknown is not None:
        raise refused("option", unknown, accepted)
    chosen = replace(
        level if isinstance(level, Compression) else Compression(level=level), **changes
    )
    check_operations(chosen)
    return chosen


def check_operations(options: Compression) -> None:
    """Check that the operations of a policy exist.

    Raises:
        InvalidValueError: one does not; the text names those that are spelt alike.

    Example:
        >>> check_operations(Compression(policy={"softmax": "keep"}))
    """
    _check(tuple(sorted({rule.operation for rule in options.rules})))


@lru_cache(maxsize=256)
def _check(names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in _USUAL]
    if not unknown:
        return
    known = {name.strip("_") for name in _known()}
    for name in unknown:
        if name.strip("_") in known:
            continue
        raise InvalidValueError(
            f"policy {name!r}: there is no such operation{_hint(name, sorted(known))}; accepted "
            "are the names of torch's functions, of registered operators, and of "
            "autograd.Functions that are defined by now"
        )


def _hint(name: str, accepted: Sequence[str]) -> str:
    close = get_close_matches(name, accepted, n=_MOST_NAMES)
    return f" (did you mean {', '.join(map(repr, close))}?)" if close else ""


def _known() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        for function in torch.overrides.get_testing_overrides():
            yield operation_name(function)
    names: Any = torch._C._dispatch_get_all_op_names()
    for name in names:
        yield name.split("::")[-1].split(".")[0]
    yield GRAPH  # torch defines it when it compiles one
    waiting = [torch.autograd.Function]
    while waiting:
        subclasses = waiting.pop().__subclasses__()
        yield from (cls.__name__ for cls in subclasses)
        waiting += subclasses


# Not to be looked up, for a program that names no others; and what the hooks themselves call so.
_USUAL = {key.split(":")[0] for key in DEFAULT_POLICY} | {"checkpoint", "unknown"}
