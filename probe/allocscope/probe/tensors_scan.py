"""Finds the live tensors of a process, joined by Storage, and its modules, optimizers and roots of autograd graphs.

Of what is found only ids, figures and weak references are kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

from allocscope.model.tensors import View
from allocscope.probe.tensors_gate import BACKWARD, GRADIENT, Gate
from allocscope.probe.tensors_heap import slices
from allocscope.probe.tensors_pace import Pace
from allocscope.probe.tensors_torch import Facts, Role, TorchObjects, attributes_of
from allocscope.probe.torch_cuda import TORCH_ERRORS

MOST_VIEWS = 8
"""Of one Storage, told; so are the next two."""
MOST_TENSORS = 32
MOST_SAVED = 4


class Saved(NamedTuple):
    """A node of an autograd graph that has a Storage for its backward."""

    node: str
    attribute: str
    root: int
    """The id of a tensor from which the node is reached."""
    packed: bool = False
    """By the job's own hooks."""


@dataclass(slots=True)
class Found:
    """A Storage, as it is being found. Of tuples, since most have one tensor: thousands of lists more would set Python's collector going."""

    device_index: int
    address: int
    bytes: int
    tensor_count: int = 0
    tensors: tuple[int, ...] = ()
    """Ids of the first of Python's tensors on it."""
    views: tuple[View, ...] = ()
    more_views: int = 0
    """Tensors that look at it in yet other ways."""
    saved: tuple[Saved, ...] = ()
    more_saved: int = 0

    def look(self, view: View) -> None:
        """A tensor looks at it so."""
        if view in self.views:
            return
        if len(self.views) < MOST_VIEWS:
            self.views += (view,)
        else:
            self.more_views += 1

    def save(self, saved: Saved) -> None:
        """A node has it."""
        if len(self.saved) < MOST_SAVED:
            self.saved += (saved,)
        else:
            self.more_saved += 1


@dataclass(slots=True)
class Catalogue:
    """All that was found."""

    storages: dict[tuple[int, int], Found] = field(default_factory=dict)
    """By device and address."""
    of_tensor: dict[int, Found] = field(default_factory=dict)
    parameters: set[int] = field(default_factory=set)
    gradients: dict[int, int] = field(default_factory=dict)
    """From a gradient's id to its tensor's."""
    wrapped: dict[int, int] = field(default_factory=dict)
    """From the id of a tensor to that of the wrapper (a DTensor, ...) that has it as an attribute."""
    roots: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    """Tensors that autograd made, on any device, by their ids."""
    beyond: dict[int, int] = field(default_factory=dict)
    """From a root's id to that of one which it is reached from."""
    leaves: set[int] = field(default_factory=set)
    """Ids of tensors that may have a gradient, on any device. No weak reference: `torch.utils.swap_tensors` refuses a parameter that has one, in the job."""
    modules: list[weakref.ref[Any]] = field(default_factory=list)
    optimizers: list[weakref.ref[Any]] = field(default_factory=list)

    def storage(self, facts: Facts) -> Found:
        key = facts[:2]
        found = self.storages.get(key)
        if found is None:
            found = self.storages[key] = Found(facts.device_index, facts.address, facts.bytes)
        found.bytes = max(found.bytes, facts.bytes)
        found.look(facts.view)
        return found


class Scan:
    """Fills a catalogue from the heap."""

    def __init__(self, torch: TorchObjects, pace: Pace) -> None:
        self._torch, self._pace = torch, pace
        self.catalogue = Catalogue()
        self._gate = Gate(BACKWARD, GRADIENT)
        self._roles: dict[int, Role] = {}
        """By the id of a type; of the types that matter."""
        self._types: dict[int, type] = {}
        """All that were seen: they must live for their ids to mean them."""
        self._take: dict[Role, Callable[[Any], None]] = {
            Role.TENSOR: self.tensor,
            Role.PARAMETER: self._parameter,
            Role.WRAPPER: self._wrapper,
            Role.MODULE: lambda module: self._keep(self.catalogue.modules, module),
            Role.OPTIMIZER: lambda optimizer: self._keep(self.catalogue.optimizers, optimizer),
        }

    def run(self) -> None:
        for piece in slices(self._pace, "tensors"):
            kinds = list(map(id, map(type, piece)))
            for kind in set(kinds).difference(self._types):
                self._meet(type(piece[kinds.index(kind)]))
            for item in compress(piece, map(self._roles.__contains__, kinds)):
                self._one(item)

    def _meet(self, kind: type) -> None:
        self._types[id(kind)] = kind
        role = self._torch.role_of(kind)
        if role is not None:
            self._roles[id(kind)] = role

    def _one(self, item: Any) -> None:
        try:
            self._take[self._roles[id(type(item))]](item)
        except TORCH_ERRORS:
            self._pace.leave_out("tensors, modules or optimizers that cannot be read")

    def _keep(self, where: list[weakref.ref[Any]], item: Any) -> None:
        where.append(weakref.ref(item))

    def _parameter(self, parameter: Any) -> None:
        self.catalogue.parameters.add(id(parameter))
        self.tensor(parameter)

    def _wrapper(self, wrapper: Any) -> None:
        """What has no storage, and its gradient, are what they hold."""
        for held in self._torch.wrapped_in(wrapper):
            self.catalogue.wrapped[id(held)] = id(wrapper)
        self._graph(wrapper)

    def tensor(self, tensor: Any) -> None:
        """Take a tensor with a storage of its own."""
        self._graph(tensor)
        facts = self._torch.facts(tensor)
        if facts is None:
            return
        found = self.catalogue.storage(facts)
        if self.catalogue.of_tensor.get(id(tensor)) is not found:
            self.catalogue.of_tensor[id(tensor)] = found
            found.tensor_count += 1
            if len(found.tensors) < MOST_TENSORS:
                found.tensors += (id(tensor),)

    def _graph(self, tensor: Any) -> None:
        """Its part in autograd. A view's is its base's."""
        if not self._torch.requires_grad(tensor):
            return
        if self._torch.is_view(tensor):
            base = self._torch.base(tensor)
            if base is None or not self._torch.requires_grad(base):
                return
            self.catalogue.beyond.setdefault(id(base), id(tensor))
            tensor = base
        leaf = self._torch.is_leaf(tensor)
        if not leaf:
            self.catalogue.roots[id(tensor)] = weakref.ref(tensor)
        if leaf or self._torch.retains_grad(tensor):
            self.catalogue.leaves.add(id(tensor))

    def gradients(self) -> None:
        """Take the gradients of the leaves, which C++ alone may hold; not while a backward runs or somebody is at them."""
        left = set(self.catalogue.leaves)
        for parameter in self._parameters():
            if id(parameter) in left:
                left.remove(id(parameter))
                if not self.gradient_of(parameter):
                    return
        for piece in slices(self._pace, "gradients") if left else ():
            for item in compress(piece, map(left.__contains__, map(id, piece))):
                if not self.gradient_of(item):
                    return

    def _parameters(self) -> Iterator[Any]:
        """Of all modules: most leaves, without another look at the heap."""
        for reference in self.catalogue.modules:
            parameters: Any = (attributes_of(reference()) or {}).get("_parameters")
            if issubclass(type(parameters), dict):
                yield from list(dict.values(parameters))

    def gradient_of(self, item: Any) -> bool:
        """Take its gradient, where it is a tensor that may have one; False where that cannot be, and goes on so."""
        if not self._may_have_gradient(item):
            return True
        read = None if self._pace.is_over() else self._gate.read(item, self._torch.gradient, self._pace)
        if read is None:
            self._pace.leave_out("gradients: a backward pass was running, or the job was at work on them")
            return False
        if read[0] is not None:
            self.catalogue.gradients[id(read[0])] = id(item)
            self._gradient(read[0])
        return True

    def _may_have_gradient(self, item: Any) -> bool:
        """Anew, of what has the id of a leaf: that may have ended."""
        torch = self._torch
        if not torch.is_tensor(item) or not torch.is_plain(type(item)):
            return False
        return (
            torch.requires_grad(item) and not torch.is_view(item) and (torch.is_leaf(item) or torch.retains_grad(item))
        )

    def _gradient(self, gradient: Any) -> None:
        if self._torch.role_of(type(gradient)) is Role.WRAPPER:
            self._wrapper(gradient)
        else:
            self.tensor(gradient)
