"""What a callable refers to: what it is bound to, closes over, was given, and names.

Any thread; a microsecond or two a function, whose names are looked for once.
"""

from __future__ import annotations

import functools
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any


def parts_of(value: Any) -> tuple[Any, ...]:
    """Return what a callable is made of, but for globals; the items of a list or a tuple.

    Example:
        >>> parts_of(functools.partial(max, 1, key=abs)) == (max, 1, abs)
        True
    """
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, FunctionType):
        contents = (cell.cell_contents for cell in value.__closure__ or () if is_filled(cell))
        return *contents, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    return tuple(value) if isinstance(value, (list, tuple)) else ()


def is_filled(cell: CellType) -> bool:
    """Tell whether a closure's cell holds something: its name may have no value yet."""
    try:
        cell.cell_contents  # noqa: B018 - it raises where it does not
    except ValueError:
        return False
    return True


def globals_of(function: Any) -> dict[str, Any]:
    """Return the globals that the code of a function, and of those within it, names."""
    if not isinstance(function, FunctionType):
        return {}
    known = function.__globals__
    return {name: known[name] for name in names_in(function.__code__) if name in known}


@functools.lru_cache(maxsize=1024)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and of attributes in a code, and in those within it."""
    within = (each for each in code.co_consts if isinstance(each, CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(n for each in within for n in names_in(each))]))
