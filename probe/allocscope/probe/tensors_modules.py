"""What modules and optimizers call the tensors that they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from allocscope.probe.tensors_pace import Pace
from allocscope.probe.tensors_scan import Catalogue
from allocscope.probe.tensors_torch import attributes_of, type_name

DEEPEST = 100
"""Modules in modules."""


@dataclass(frozen=True, slots=True)
class State:
    """A tensor of an optimizer's state."""

    optimizer: str
    key: str
    parameter: int
    """Its id."""


class Modules:
    """The tree of modules, and what lies in it and in optimizers, all by ids."""

    def __init__(self, catalogue: Catalogue, pace: Pace) -> None:
        self.types: dict[int, str] = {}
        """Of each module, the name of its class."""
        self.parents: dict[int, tuple[int, str]] = {}
        """From a module's id to that of the one that holds it, and its name there; the first that was found."""
        self.parameters: dict[int, tuple[int, str]] = {}
        self.buffers: dict[int, tuple[int, str]] = {}
        self.states: dict[int, State] = {}
        for module in _living(catalogue.modules, pace):
            self._take_module(module)
        for optimizer in _living(catalogue.optimizers, pace):
            self._take_optimizer(optimizer)

    def path(self, module: int) -> tuple[int, tuple[str, ...]]:
        """The outermost module that holds it, and the names from there."""
        names: list[str] = []
        while module in self.parents and len(names) < DEEPEST:
            module, name = self.parents[module]
            names.append(name)
        return module, tuple(reversed(names))

    def roots(self) -> set[int]:
        """Modules that no module holds."""
        return self.types.keys() - self.parents.keys()

    def _take_module(self, module: Any) -> None:
        self.types[id(module)] = type_name(module)
        own = attributes_of(module) or {}
        for kind, held in (("_modules", self.parents), ("_parameters", self.parameters), ("_buffers", self.buffers)):
            for name, item in _items(own.get(kind)):
                if item is not None and item is not module:
                    held.setdefault(id(item), (id(module), name))

    def _take_optimizer(self, optimizer: Any) -> None:
        own, name = attributes_of(optimizer) or {}, type_name(optimizer)
        for parameter, states in _items(own.get("state"), any_key=True):
            for key, state in _items(states):
                self.states.setdefault(id(state), State(name, key, id(parameter)))


def _living(references: list[weakref.ref[Any]], pace: Pace) -> Iterator[Any]:
    for reference in references:
        if pace.is_over():
            pace.leave_out("names of modules and optimizers: no time was left for them all")
            return
        item = reference()
        if item is not None:
            yield item


def _items(mapping: Any, *, any_key: bool = False) -> list[tuple[Any, Any]]:
    """Of a dict of any kind, as it is at this moment; by names, unless `any_key`."""
    if not issubclass(type(mapping), dict):
        return []
    items = list(dict.items(mapping))
    return items if any_key else [(key, value) for key, value in items if type(key) is str]
