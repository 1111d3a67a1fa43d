"""Finds what autograd has saved for backward, from the tensors that it made downward.

A saved tensor is looked at only where the job's own packing hooks have no part in it (torch.autograd.graph.saved_tensors_hooks,
checkpointing, offloading): to unpack would run the job's code. torch tells that of each by `SavedTensor.unpack_hook`; where
that is missing nothing saved is looked at.

While a backward runs, the engine lets go of saved tensors in threads of its own without the GIL, so none is looked at then; and
a tensor's node is not while another thread may be changing tensors in place (`tensors_gate`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from allocscope.probe.tensors_gate import BACKWARD, IN_PLACE, Gate
from allocscope.probe.tensors_pace import Pace
from allocscope.probe.tensors_scan import Catalogue, Saved
from allocscope.probe.tensors_torch import Role, TorchObjects, attributes_of, mro_of, own_of, type_name
from allocscope.probe.torch_cuda import TORCH_ERRORS

RAW = "_raw_saved_"
LEAF = "AccumulateGrad"
BUSY = "what autograd saved: a backward pass was running, or the job was changing tensors in place"
DEEPEST_PACK = 2
"""Of tuples and lists that a hook packed."""

Pairs = list[tuple[Any, Any]]
"""An unpacking hook, or None, and what is saved: a tensor, or what the hook packed; None where it is freed."""
_pair = attrgetter("unpack_hook", "data")


@dataclass(slots=True)
class _Attribute:
    """Something that the nodes of one type save."""

    name: str
    """As backward's formula has it."""
    get: attrgetter[Any]
    """SavedTensor, or a tuple of them."""
    one: attrgetter[Any]
    """The pair of the one SavedTensor."""
    is_many: bool | None = None
    """Whether it is a tuple; None: not known, none was seen."""


@dataclass(slots=True)
class _Reader:
    """How to read the nodes of one type."""

    kind: type
    """Kept, for its id to mean it."""
    name: str
    saved: list[_Attribute]
    has_attributes: bool
    """A torch.autograd.Function's, that may have attributes of its own."""


class Graph:
    """Adds to a catalogue what autograd saved."""

    def __init__(self, torch: TorchObjects, catalogue: Catalogue, pace: Pace) -> None:
        self._torch, self._catalogue, self._pace = torch, catalogue, pace
        self._gate, self._node_gate = Gate(BACKWARD), Gate(BACKWARD, IN_PLACE)
        self._readers: dict[int, _Reader] = {}
        self._seen: dict[int, Any] = {}
        """Nodes by id; they must live for that. What they saved a backward still lets go of."""
        self._starts: dict[int, int] = {}
        """From the id of a root's own node to the root's."""
        self._packed = 0

    def run(self) -> None:
        """Walk from every root; a node counts for the first that leads to it."""
        if self._catalogue.roots and not self._torch.tells_hooks:
            self._pace.leave_out(
                "what autograd saved: this torch does not tell which saved tensors hooks of the job have packed"
            )
            return
        for root, reference in self._catalogue.roots.items():
            tensor = reference()
            nodes = [] if tensor is None else self._node_gate.read(tensor, self._torch.grad_fn, self._pace)
            del tensor
            if nodes is None:
                self._pace.leave_out(BUSY)
                break
            if nodes and nodes[0] is not None and not self._from(nodes[0], root):
                break
        self._seen.clear()
        if self._packed:
            self._pace.leave_out(
                f"{self._packed:,} saved tensors that hooks of the job have packed (checkpointing, offloading): unpacking them would run its code",
                complete=True,
            )

    def _from(self, node: Any, root: int) -> bool:
        if id(node) not in self._seen:
            self._starts[id(node)] = root
        stack = [node]
        while stack:
            node = stack.pop()
            if id(node) in self._seen:
                met = self._starts.get(id(node), root)
                if met != root:
                    self._catalogue.beyond.setdefault(met, root)
                continue
            if self._pace.is_over():
                self._pace.leave_out("autograd graphs: no time was left for them all")
                return False
            self._seen[id(node)] = node
            reader = self._reader(node)
            if reader.name != LEAF and not self._read(node, reader, root):
                return False
            with suppress(*TORCH_ERRORS):
                stack += [child for child, _ in node.next_functions if child is not None]
        return True

    def _reader(self, node: Any) -> _Reader:
        kind = type(node)
        reader = self._readers.get(id(kind))
        if reader is None:
            names = sorted({name for base in mro_of(kind) for name in own_of(base) if name.startswith(RAW)})
            reader = _Reader(kind, type_name(node), list(map(_attribute, names)), attributes_of(node) is not None)
            self._readers[id(kind)] = reader
        return reader

    def _read(self, node: Any, reader: _Reader, root: int) -> bool:
        """Take what one node saved; False where a backward runs, and goes on running."""
        for attribute in reader.saved:
            try:
                pairs = self._saved(node, attribute)
            except TORCH_ERRORS:  # its buffers are freed
                continue
            if pairs is None:
                self._pace.leave_out(BUSY)
                return False
            for hook, data in pairs:
                self._take(data, Saved(reader.name, attribute.name, root, packed=hook is not None))
        if reader.has_attributes:
            for key, value in list((attributes_of(node) or {}).items()):
                if self._torch.is_tensor(value):
                    self._tensor(value, Saved(reader.name, str(key), root))
        return True

    def _saved(self, node: Any, attribute: _Attribute) -> Pairs | None:
        """None: a backward runs."""
        if attribute.is_many is None:
            raw = self._gate.read(node, attribute.get, self._pace)
            if raw is None:
                return None
            attribute.is_many = type(raw[0]) is tuple  # and no more is done with it: its memory is the node's to free
        if not attribute.is_many:
            return self._gate.read(node, attribute.one, self._pace)
        return self._gate.read_all(node, attribute.get, _pair, self._pace)

    def _take(self, data: Any, saved: Saved) -> None:
        if not saved.packed:
            if data is not None:
                self._tensor(data, saved)
        else:
            tensors = list(self._unpacked(data, DEEPEST_PACK))
            self._packed += not tensors
            for tensor in tensors:
                self._tensor(tensor, saved)

    def _unpacked(self, data: Any, depth: int) -> Iterator[Any]:
        """The tensors in what a hook packed, where that can be seen without the hook."""
        if self._torch.is_tensor(data):
            yield data
        elif depth and (type(data) is tuple or type(data) is list):
            for item in list(data):
                yield from self._unpacked(item, depth - 1)

    def _tensor(self, tensor: Any, saved: Saved) -> None:
        if self._torch.role_of(type(tensor)) is Role.WRAPPER:
            for held in self._torch.wrapped_in(tensor):
                self._tensor(held, saved)
            return
        with suppress(*TORCH_ERRORS):
            facts = self._torch.facts(tensor)
            if facts is not None:
                self._catalogue.storage(facts).save(saved)


def _attribute(name: str) -> _Attribute:
    one = attrgetter(f"{name}.unpack_hook", f"{name}.data")
    return _Attribute(name.removeprefix(RAW), attrgetter(name), one)
