"""The pytest plugin: `@pytest.mark.vram_limit("2GiB")` and `@pytest.mark.vram_leak`.

A wrong argument ends the run before the first test, with or without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vramx.errors import InvalidValueError
from vramx.sizes import parse_size

LIMIT, LEAK = "vram_limit", "vram_leak"
_LEAST_PYTEST = (8, 0)
_LINES = (
    f'{LIMIT}(size): fail where the test allocates more of a CUDA device, as in "2GiB", beyond '
    "what there was when it was called",
    f'{LEAK}(size="0"): fail where more CUDA memory than that is left of the test after teardown',
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, and what measures them where this pytest can do it."""
    for line in _LINES:
        config.addinivalue_line("markers", line)
    if pytest.version_tuple[:2] >= _LEAST_PYTEST:
        from vramx.testing.hooks import MemoryHooks

        config.pluginmanager.register(MemoryHooks(), "vramx-memory")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Check every mark.

    Raises:
        pytest.UsageError: an argument is not accepted, or this pytest is too old.
    """
    for item in items:
        for name in (LIMIT, LEAK):
            size_of(item, name)


def size_of(item: pytest.Item, name: str) -> int | None:
    """Return the bytes that a test's mark gives, None where it has no such mark.

    Raises:
        pytest.UsageError: its argument is not accepted, or this pytest is too old.
    """
    mark = item.get_closest_marker(name)
    if mark is None:
        return None
    where = f"{item.nodeid}: {name}"
    if pytest.version_tuple[:2] < _LEAST_PYTEST:
        raise pytest.UsageError(f"{where} needs pytest 8 or newer; this is {pytest.__version__}")
    given = mark.args if mark.args or name == LIMIT else (0,)
    if len(given) != 1 or mark.kwargs:
        raise pytest.UsageError(f'{where} takes one size, as in {name}("2GiB")')
    try:
        return parse_size(given[0])
    except (InvalidValueError, TypeError) as error:
        raise pytest.UsageError(f"{where}: {error}") from None
