"""Who holds the live tensors of a process: one row a Storage, and what grew between two such reports."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from allocscope.model.figures import size


class TensorKind(Enum):
    """What a Storage is for; of one that is several things the first of these."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    """Registered as a buffer of a module."""
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    """Saved by a node of an autograd graph, for its backward."""
    OTHER = "other"
    NOT_HELD = "not_held"
    """Requested of the allocator, and in no tensor that was found: what C++ alone holds, and what was left out. Of totals, never of a row."""


class HolderKind(Enum):
    """Where the way to a tensor begins."""

    MODULE = "module"
    """An attribute of a module, or of what a module holds."""
    GRADIENT = "gradient"
    """The .grad of a leaf tensor."""
    OPTIMIZER = "optimizer"
    AUTOGRAD = "autograd"
    """A node that saved it for its backward."""
    VARIABLE = "variable"
    """A variable of a running function."""
    GLOBAL = "global"
    CLASS = "class"
    """An attribute of a class."""
    CLOSURE = "closure"
    """A variable that a function took with it."""
    FRAME = "frame"
    """A variable of a frame that runs no longer: a generator's, or one kept by a traceback."""
    OBJECT = "object"
    """An object or container, of which no name was found."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who refers to a tensor, as people write it."""

    kind: HolderKind
    path: str
    """`model.layers.0.weight`, `losses[137]`, `AdamW state 'exp_avg' of model.layers.0.weight`."""
    place: str | None = None
    """Where the path begins: `frame variable 'losses' of train() in train.py`."""
    container: str | None = None
    """What the tensor itself lies in, where that is a container: `list of 138`."""
    line: int | None = None
    """Where the frame of `place` is just now."""

    @property
    def text(self) -> str:
        """In one line: `losses[137] (list of 138 in frame variable 'losses' of train() in train.py:41)`."""
        place = f"{self.place}:{self.line}" if self.place and self.line is not None else self.place
        about = " in ".join(part for part in (self.container, place) if part)
        return f"{self.path} ({about})" if about else self.path

    @property
    def pattern(self) -> str:
        """The path with every index as `*`: `losses[*]`, `model.layers.*.weight`."""
        path = re.sub(r"\[[^\[\]]*\]", lambda found: re.sub(r"[0-9a-f]{8,}|\d+", "*", found[0]), self.path)
        return re.sub(r"(?<=\.)\d+(?=[.\[ ]|$)", "*", path)


@dataclass(frozen=True, slots=True)
class View:
    """How tensors look at a Storage."""

    shape: tuple[int, ...]
    dtype: str
    """Without `torch.`: float32."""

    @property
    def text(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


@dataclass(frozen=True, slots=True)
class StorageRow:
    """One Storage and all that was found to look at it: its bytes are free only once none of them is there."""

    device_index: int
    address: int
    """Where it begins; an allocator's block begins there too."""
    bytes: int
    """Of the Storage, however little of it its tensors show."""
    kind: TensorKind
    tensor_count: int
    """Python's tensors on it; 0 where only autograd has it."""
    views: tuple[View, ...] = ()
    """Distinct ones, the first few."""
    more_views: int = 0
    """Tensors that look at it in yet other ways."""
    holders: tuple[Holder, ...] = ()
    """None: held by C++ alone, or by a value of running code that has no name."""
    more_holders: int = 0


@dataclass(frozen=True, slots=True)
class KindTotal:
    """All of one kind on one device."""

    device_index: int
    kind: TensorKind
    bytes: int
    storage_count: int | None = None
    """None: not known, of what no tensor was found for."""


@dataclass(frozen=True, slots=True)
class DeviceTensors:
    """What was found on a device, beside what its allocator says."""

    device_index: int
    found_bytes: int
    requested_bytes: int | None = None
    """Live blocks as asked for; while blocks wait for another stream, less what those were rounded up by. None: it cannot be asked."""
    not_held_bytes: int | None = None
    """Requested less found, at least 0; too little where tensors lie in memory that the allocator did not give, as another process's."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Storages of one kind, held alike and looking alike; made of all of them, also of those that no row tells."""

    kind: TensorKind
    holder: str | None
    """The first holder's pattern; None: no holder was found."""
    place: str | None
    view: View | None
    storage_count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorReport:
    """Who held the live tensors of a process, at about one moment: the job went on meanwhile."""

    time_us: int
    device_type: str
    took_us: int = 0
    absence: str | None = None
    """Why nothing was looked at."""
    complete: bool = True
    """Whether everything was looked at in the time given, and with nothing out of sight."""
    left_out: tuple[str, ...] = ()
    """What was not looked at or is not told, and why, for people."""
    devices: tuple[DeviceTensors, ...] = ()
    totals: tuple[KindTotal, ...] = ()
    groups: tuple[TensorGroup, ...] = ()
    """Largest first."""
    rows: tuple[StorageRow, ...] = ()
    """Largest first, bounded in number."""
    more_rows: int = 0
    more_rows_bytes: int = 0

    def to_plain(self) -> dict[str, Any]:
        """As dict, list, str, int and bool alone; what is None is not there."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_plain(cls, plain: object) -> TensorReport:
        """What `to_plain` gave, also of another version: unknown keys are passed over.

        Raises ValueError, with the place, where something is missing or of the wrong kind.
        """
        report: TensorReport = _read(plain, cls, "tensor report")
        return report


@dataclass(frozen=True, slots=True)
class Growth:
    """What a group has more of than it had; less where below 0."""

    kind: TensorKind
    holder: str | None
    place: str | None
    view: View | None
    storage_count: int
    bytes: int

    @property
    def text(self) -> str:
        """In one line: `losses[*] (512x1024 float32): +50 tensors, +100.00 MiB`."""
        name = self.holder or f"{self.kind.value.replace('_', ' ')}, no holder found"
        view = f" ({self.view.text})" if self.view else ""
        return f"{name}{view}: {self.storage_count:+,} tensors, {_signed(self.bytes)}"


def _signed(bytes_: int) -> str:
    return f"{'+' if bytes_ >= 0 else ''}{size(bytes_)}"


_Key = tuple[TensorKind, "str | None", "str | None", "View | None"]


def growth(older: TensorReport, newer: TensorReport) -> tuple[Growth, ...]:
    """What grew from one report to a later one of the same process, most bytes first: what keeps growing is the leak."""
    before, after = _by_key(older.groups), _by_key(newer.groups)
    grown = (_difference(key, before.get(key, (0, 0)), has) for key, has in after.items())
    more = [g for g in grown if g.bytes > 0 or (g.bytes == 0 and g.storage_count > 0)]
    return tuple(sorted(more, key=lambda g: (-g.bytes, -g.storage_count, g.holder or "")))


def _by_key(groups: Iterable[TensorGroup]) -> dict[_Key, tuple[int, int]]:
    return {(g.kind, g.holder, g.place, g.view): (g.storage_count, g.bytes) for g in groups}


def _difference(key: _Key, had: tuple[int, int], has: tuple[int, int]) -> Growth:
    return Growth(*key, storage_count=has[0] - had[0], bytes=has[1] - had[1])


# as plain values, and back


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        told = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: _plain(item) for name, item in told if item is not None}
    return value


_hints = functools.cache(typing.get_type_hints)


def _read(value: object, hint: Any, where: str) -> Any:
    """A value of the type `hint` from its plain form."""
    if typing.get_origin(hint) is tuple:
        _check(isinstance(value, (list, tuple)), where, "a list", value)
        item = typing.get_args(hint)[0]
        return tuple(_read(v, item, f"{where}[{i}]") for i, v in enumerate(typing.cast("list[object]", value)))
    if isinstance(hint, types.UnionType):
        return None if value is None else _read(value, typing.get_args(hint)[0], where)
    if issubclass(hint, Enum):
        return _read_member(value, hint, where)
    if is_dataclass(hint):
        return _read_fields(value, typing.cast("type", hint), where)
    _check(type(value) is hint, where, hint.__name__, value)
    return value


def _read_member(value: object, hint: type[Enum], where: str) -> Enum:
    members = [m for m in hint if m.value == value]
    _check(bool(members), where, " or ".join(str(m.value) for m in hint), value)
    return members[0]


def _read_fields(value: object, hint: type, where: str) -> Any:
    _check(isinstance(value, Mapping), where, "an object", value)
    given = typing.cast("Mapping[str, object]", value)
    hints, told = _hints(hint), {}
    for field in fields(hint):
        if field.name in given:
            told[field.name] = _read(given[field.name], hints[field.name], f"{where}.{field.name}")
        else:
            told |= _default(field, hints[field.name], where)
    return hint(**told)


def _default(field: Field[Any], hint: Any, where: str) -> dict[str, Any]:
    """A field that was not told: its default, or None where it may be that."""
    if field.default is not MISSING:
        return {}
    if not isinstance(hint, types.UnionType):
        raise ValueError(f"{where} lacks {field.name!r}: it is not what TensorReport.to_plain() gives")
    return {field.name: None}


def _check(right: bool, where: str, wanted: str, value: object) -> None:
    if not right:
        raise ValueError(f"{where} should be {wanted}, not {type(value).__name__} {str(value)[:80]!r}")
