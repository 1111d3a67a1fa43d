"""Finds who holds what was found: from the tensors upward, through containers and objects, to something with a name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

from allocscope.model.tensors import Holder, HolderKind
from allocscope.probe.tensors_frames import Variable, namespaces, variables_by_id, variables_of
from allocscope.probe.tensors_heap import referrers
from allocscope.probe.tensors_modules import Modules
from allocscope.probe.tensors_names import NAME, Form, Name, further
from allocscope.probe.tensors_pace import Pace
from allocscope.probe.tensors_steps import Reference, References, Way, described, frame_of, key_text
from allocscope.probe.tensors_torch import name_of, type_name

MOST_LEVELS = 6
"""From a tensor up: each costs one look at the whole heap."""
MOST_HOLDERS = 4
"""Of one object, kept; what more there is is counted."""


_Edges = tuple[Any, ...]
"""Who holds something, how, and the way's text, one edge after another: a tuple of tuples would be many objects more."""
_EDGE = 3


class Holders:
    """Names of objects, by their ids."""

    def __init__(self, modules: Modules, gradients: Mapping[int, int], imported: Mapping[str, Any], pace: Pace) -> None:
        self._modules, self._gradients, self._pace = modules, gradients, pace
        self._namespaces = namespaces()
        for name, module in list(imported.items()):
            if type(module) is ModuleType:
                self._namespaces.setdefault(id(vars(module)), name)  # __main__ has other names, too
        self._references = References()
        self._starts: dict[int, list[Name]] = {}
        """Names of what needs no holder to have one."""
        self._held_by: dict[int, _Edges] = {}
        self._more: dict[int, int] = {}
        self._types: dict[int, str] = {}
        self._containers: dict[int, str] = {}
        self._names: dict[int, Name | None] = {}
        self._above: set[int] = set()
        self._above_tuples = False
        """Whether there is a tuple among them."""

    def look(self, targets: Iterable[int]) -> None:
        """Look for the holders of the objects of these ids, and for theirs, until all have names or the time is up."""
        left = {one for one in targets if not self._is_known(one)}
        for level in range(MOST_LEVELS + 1):
            self._begin_variables(left)
            if level > 0:
                left = {one for one in left if one not in self._starts and not self._is_known(one)}
            if not left or level == MOST_LEVELS or self._pace.is_over():
                break
            left = self._go_up(left)
        if left and self._pace.is_over():
            self._pace.leave_out("names of some holders: no time was left")
        elif left:
            self._pace.leave_out(f"names of some holders: none within {MOST_LEVELS} steps", complete=True)

    # reading

    def _go_up(self, ids: set[int]) -> set[int]:
        functions, self._above, self._above_tuples = self._above_tuples, set(), False
        referrers(self._pace, ids, self._examine, functions=functions)
        return self._above

    def _begin_variables(self, ids: set[int]) -> None:
        for held, variable in variables_by_id().items():
            if held in ids:
                self._begin(held, _of_variable(variable))

    def _examine(self, item: Any, held: set[int]) -> None:
        frame = frame_of(item)
        if frame is not None:
            self._of_frame(item, frame, held)
        elif issubclass(type(item), type):
            for one in held:
                self._begin(one, Name(HolderKind.CLASS, name_of(item), "attribute of a class", form=Form.ATTRIBUTES))
        elif type(item) is not ModuleType:
            self._of_object(item, held)

    def _of_frame(self, item: Any, frame: FrameType, held: set[int]) -> None:
        of = "kept with the frame of" if item is frame else f"of {type_name(item)}"
        for one, variable in variables_of(frame):
            if one in held:
                place = f"variable {variable.name!r} {of} {variable.function}() in {variable.file}"
                self._begin(one, Name(HolderKind.FRAME, variable.name, place, variable.line, variable.library))

    def _of_object(self, item: Any, held: set[int]) -> None:
        me = id(item)
        if me in self._namespaces:
            place = f"global variable {NAME} of {self._namespaces[me]}"
            self._begin(me, Name(HolderKind.GLOBAL, "", place, form=Form.NAMESPACE))
        elif type(item) is FunctionType:
            self._begin(me, Name(HolderKind.CLOSURE, item.__qualname__))
        container = described(item)
        self._types[me] = container or type_name(item)
        if container is not None:
            self._containers[me] = container
        self._above_tuples |= type(item) is tuple
        for reference in self._read(item, held):
            self._refer(me, reference)

    def _read(self, item: Any, held: set[int]) -> list[Reference]:
        try:
            return self._references.of(item, held)
        except RuntimeError:  # it changed in the middle
            return [Reference(one, Way.UNKNOWN) for one in held]

    def _refer(self, holder: int, reference: Reference) -> None:
        edges = self._held_by.get(reference.held, ())
        if len(edges) < MOST_HOLDERS * _EDGE:
            self._held_by[reference.held] = (*edges, holder, reference.way, reference.text)
            self._above.add(holder)
        else:
            self._more[reference.held] = self._more.get(reference.held, 0) + 1

    def _begin(self, one: int, name: Name) -> None:
        names = self._starts.setdefault(one, [])
        if all(name.path != other.path or name.place != other.place for other in names):
            names.append(name)

    # naming

    def more(self, one: int) -> int:
        """How many holders there are besides those told."""
        return self._more.get(one, 0)

    def name(self, one: int) -> Name | None:
        """What the object of this id is best called."""
        if one not in self._names:
            self._names[one] = None  # where a circle leads back to it
            self._names[one] = min(self._all(one), key=Name.rank, default=None)
        return self._names[one]

    def holders(self, one: int) -> list[Holder]:
        """Who holds the object of this id, what says most first."""
        ways = [*self._all(one)]
        if len(ways) > 1:
            ways.sort(key=Name.rank)
        return [name.holder() for name in ways]

    def _all(self, one: int) -> Iterator[Name]:
        yield from self._starts.get(one, ())
        yield from self._of_modules(one)
        edges = iter(self._held_by.get(one, ()))
        for holder, way, text in zip(edges, edges, edges, strict=True):
            above = self.name(holder) or Name(HolderKind.OBJECT, f"<{self._types.get(holder, 'object')}>")
            name = further(above, way, text)
            if above.form is Form.PLAIN:
                name.container = name.container or self._containers.get(holder)
            yield name
        if one in self._modules.types and one not in self._starts and one not in self._held_by:
            yield Name(HolderKind.MODULE, self._modules.types[one])

    def _is_known(self, one: int) -> bool:
        known = self._modules
        held = (known.parents, known.parameters, known.buffers, known.states, self._gradients)
        return any(one in those for those in held)

    def _of_modules(self, one: int) -> Iterator[Name]:
        """What a module, an optimizer or the tensor that it is the gradient of calls it."""
        for held in (self._modules.parameters, self._modules.buffers, self._modules.parents):
            if one in held:
                yield self._in_module(*held[one])
        if one in self._gradients:
            of = self._tensor(self._gradients[one])
            yield of.renamed(HolderKind.GRADIENT, f"{of.path}.grad")
        if one in self._modules.states:
            state = self._modules.states[one]
            of = self._tensor(state.parameter)
            path = f"{state.optimizer} state {key_text(state.key)} of {of.path}"
            yield of.renamed(HolderKind.OPTIMIZER, path)

    def _tensor(self, one: int) -> Name:
        return self.name(one) or Name(HolderKind.OBJECT, "<tensor>")

    def _in_module(self, module: int, name: str) -> Name:
        root, names = self._modules.path(module)
        kind = self._modules.types.get(root, "module")
        above = self.name(root) or Name(HolderKind.MODULE, kind)
        found = above.renamed(HolderKind.MODULE, ".".join((above.path, *names, name)))
        found.container = kind
        return found


def _of_variable(variable: Variable) -> Name:
    place = f"frame variable {variable.name!r} of {variable.function}() in {variable.file}"
    return Name(HolderKind.VARIABLE, variable.name, place, variable.line, variable.library)
