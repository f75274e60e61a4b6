"""A named set of interchangeable things, where a wrong name is answered with the nearest right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from trimtab.core.errors import ConfigError, nearest, refusal

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to objects of one kind.

    Args:
        field: the configuration field whose value picks from here; it is named in the error.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._entries: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """A decorator that registers its object under `name`."""

        def register(entry: T) -> T:
            assert name not in self._entries, f"{self._field}: {name} is registered twice"
            self._entries[name] = entry
            return entry

        return register

    def get(self, name: str) -> T:
        """The object called `name`; raises `ConfigError` with the nearest name where there is none."""
        if name not in self._entries:
            near = nearest(name, self._entries)
            hint = f"did you mean {near!r}" if near else "choose another"
            raise ConfigError(refusal(self._field, name, f"must be one of {', '.join(self._entries)}", hint))
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
