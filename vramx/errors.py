"""Every exception that vramx raises on purpose, and warnings that are given once.

One base class, so that a caller can catch all of vramx with one clause, and one subclass for each
kind of mistake that a caller can act on. Each also derives from the builtin that the mistake would
have raised anyway. The text is one line: what is wrong, the value, and what is accepted. Out of
memory is not here: it is torch's own torch.OutOfMemoryError.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import shorten

_MOST_CHARACTERS = 80
_MOST_OF_MESSAGE = 160


class VramxError(Exception):
    """Base class of every error that vramx raises on purpose."""


class InvalidValueError(VramxError, ValueError):
    """An argument has a value that is not accepted; the text says which are."""


class TraceError(VramxError, ValueError):
    """A trace or a snapshot cannot be read: damaged, of another kind, or inconsistent."""


class OutputError(VramxError, OSError):
    """A file cannot be written where the caller asked for it."""


class MissingDependencyError(VramxError, ImportError):
    """An optional package is absent; the text names the command that installs it."""


class InstallError(VramxError, RuntimeError):
    """The allocator cannot be put behind this process's torch; the text says why and what to do."""


class ShimError(InstallError):
    """The part that is compiled for the installed torch cannot be built, trusted or loaded."""


class NotInstalledError(VramxError, RuntimeError):
    """Something was asked of the allocator in a process where it is not installed."""


class ModifiedInPlaceError(VramxError, RuntimeError):
    """A tensor that backward needs was changed in place after it had been saved."""


class RecomputationError(VramxError, RuntimeError):
    """A checkpointed region cannot be run again as it ran, from what was kept of its arguments."""


class FirstDerivativeOnlyError(VramxError, RuntimeError):
    """A derivative of a derivative was asked of a function that has none."""


class LogitsNotMadeError(VramxError, RuntimeError):
    """Of logits that a step did without, something is asked that only made ones have."""


class UnsupportedTensorError(VramxError, TypeError):
    """A tensor is of a class or layout that is not accepted; of what is saved, under `strict`."""


class UntraceableError(VramxError, RuntimeError):
    """A step cannot be followed without data; the text names the operation that needs them."""


class OffloadError(VramxError, RuntimeError):
    """A buffer that lies on the host was asked for where it cannot be copied back."""


class UnsupportedTorchError(VramxError, RuntimeError):
    """The installed torch cannot inline hooks into compiled graphs."""


class VramxWarning(UserWarning):
    """What vramx has to say without stopping the program."""


_said: set[str] = set()


def warn_once(text: str, stacklevel: int = 2, about: str = "") -> None:
    """Warn once a process of one thing: of what a text is about, or of that text."""
    if (about or text) not in _said:
        _said.add(about or text)
        warnings.warn(text, VramxWarning, stacklevel=stacklevel)


def brief(value: object) -> str:
    """Return a value's repr where that is short, else what it is: no error prints a whole model.

    Example:
        >>> brief(8), brief(list(range(100)))
        ('8', 'a list')
    """
    text = repr(value)
    if "\n" not in text and len(text) <= _MOST_CHARACTERS:
        return text
    return f"a {type(value).__qualname__}"


def summary(error: BaseException) -> str:
    """Return an error's class and the start of its message, in one line.

    Example:
        >>> summary(ValueError("no head\\nof 4"))
        'ValueError: no head of 4'
    """
    return f"{type(error).__name__}: {shorten(str(error), _MOST_OF_MESSAGE, placeholder=' ...')}"


def refused(
    name: str, value: object, accepted: str | Iterable[str | None], *others: str
) -> InvalidValueError:
    """Return the error of an argument whose value is not accepted.

    Args:
        accepted: the words that are, of which the nearest is named; or a text after "accepted".
        *others: what is besides words.

    Example:
        >>> str(refused("steps", 0, "is 1 or more"))
        'steps 0 is not accepted; accepted is 1 or more'
        >>> str(refused("level", "int9", ("int8", "int4")))
        "level 'int9' is not accepted (did you mean 'int8'?); accepted are 'int8' and 'int4'"
    """
    near = ""
    if not isinstance(accepted, str):
        words = list(accepted)
        known = [word for word in words if word is not None]
        close = get_close_matches(value.lower(), known, n=1) if isinstance(value, str) else []
        near = f" (did you mean {close[0]!r}?)" if close else ""
        *most, last = (*map(repr, words), *others)
        accepted = f"are {', '.join(most)} and {last}"
    return InvalidValueError(f"{name} {brief(value)} is not accepted{near}; accepted {accepted}")
