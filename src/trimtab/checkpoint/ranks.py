"""One process or many: the little agreement that a save needs.

Each action runs where it must and its result, or its exception, reaches every rank, so that a full disk on one rank is
the same error on all and no rank waits for ever. With one process it is a plain call. A rank that dies is another
matter: then the process group's own timeout ends the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The processes that save or load together.

    Args:
        group: their process group; None: the default one, or this process alone where none was initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; every rank gets all results, or the first exception."""
        if self.size == 1:
            return [action()]
        mine: tuple[Any, Exception | None]
        try:
            mine = (action(), None)
        except Exception as error:
            mine = (None, error)
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, mine, group=self.group)
        for _, failure in outcomes:
            if failure is not None:
                raise failure
        return [result for result, _ in outcomes]

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; every rank gets its result or its exception."""
        if self.rank == 0:
            return self.on_all(action)[0]
        results: list[Any] = self.on_all(lambda: None)
        first: T = results[0]
        return first
