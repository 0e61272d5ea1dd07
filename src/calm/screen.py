"""Progress reporting interface of long-running commands, implemented by the console."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Screen(Protocol):
    """Receives progress. The context managers yield the callbacks of the respective stage."""

    def stage(self, number: int, total: int, title: str, note: str) -> None: ...

    def preparation(self) -> AbstractContextManager[Callable[[Any], None]]: ...

    def training(self, steps: int) -> AbstractContextManager[Callable[[Any], None]]: ...

    def evaluation(self) -> AbstractContextManager[Callable[[str, int, int | None], None]]: ...

    def warn(self, message: str) -> None: ...
