"""The backends that the contract holds for. A further one joins by a line in BACKENDS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from allocscope.storage.repository import Repository
from allocscope.storage.sql import open_repository


@dataclass
class Backend:
    """One storage, which may be opened several times over."""

    url: str
    opened: list[Repository] = field(default_factory=list)

    def open(self) -> Repository:
        self.opened.append(open_repository(self.url))
        return self.opened[-1]

    def close(self) -> None:
        for repository in self.opened:
            repository.close()


BACKENDS: dict[str, Callable[[Path], Backend]] = {
    "sqlite": lambda folder: Backend(f"sqlite:///{folder}/allocscope.db"),
}
