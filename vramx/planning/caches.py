"""Caches of keys and values that a model's config asks for, and training has no use for.

A plan is one without them: they would hold every layer's keys and values until the step ends.
Not thread-safe; costs microseconds a module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from vramx.errors import InvalidValueError
from vramx.recompute.copies import is_cache

# What calls without a cache's methods have it as.
_NAMES = ("past_key_values", "past_key_value")


class Caches:
    """The configs of a model that ask for caches: they can be told not to, and to do so again."""

    def __init__(self, model: nn.Module) -> None:
        asking: dict[int, tuple[str, Any]] = {}
        for name, module in model.named_modules():
            config = vars(module).get("config")
            if getattr(config, "use_cache", None) is True:
                asking.setdefault(id(config), (name, config))
        self._owners = [name for name, _ in asking.values()]
        self._configs = [config for _, config in asking.values()]

    def __bool__(self) -> bool:
        return bool(self._configs)

    def code_lines(self) -> Iterator[str]:
        """Yield the lines of a program that turn them off, for a model called `model`."""
        for name in self._owners:
            owner = f"model.get_submodule({name!r})" if name else "model"
            yield f"{owner}.config.use_cache = False"

    def turn_off(self) -> None:
        for config in self._configs:
            config.use_cache = False

    def turn_on(self) -> None:
        for config in self._configs:
            config.use_cache = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Have none meanwhile."""
        self.turn_off()
        try:
            yield
        finally:
            self.turn_on()


def check_has_none(name: str, kwargs: dict[str, Any]) -> None:
    """Raise where a block is given a cache all the same: the step asks for one."""
    for word, value in kwargs.items():
        if is_cache(value) or (word in _NAMES and value is not None):
            raise InvalidValueError(
                f"{name} is given {word}, a cache that training has no use for; give the sample "
                "use_cache=False"
            )
