"""Requests written down, answered by the simulator.

Two forms are known: a case (one object: requests, settings and a device, PyTorch's history expected) and a golden run (an
object a line: a header, then a request each). Both say by which rule their device gave addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allocscope.allocator.errors import OutOfMemoryError, ReplayError
from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.allocator.simulator.device import Device, LowestGap, Rising
from allocscope.allocator.simulator.rules import NEWEST, rules_of
from allocscope.allocator.simulator.simulator import Simulator

Request = Sequence[Any]
"""["a", id, bytes, stream] allocate; ["f", id] free; ["r", id, stream] record_stream; ["s"] every stream has caught up;
["e"] empty_cache."""

TOO_MANY_BYTES = 1 << 63
"""No size that PyTorch is asked for, and no device, is so large."""
_CASE_REGION = 0x100000000000
_GOLDEN_SEGMENTS, _GOLDEN_RESERVATIONS = 0x7F0000000000, 0x600000000000
_SHAPES: dict[Any, tuple[type, ...]] = {
    "a": (str, int, int, int),
    "f": (str, int),
    "r": (str, int, int),
    "s": (str,),
    "e": (str,),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Requests, and what they were made of; bytes."""

    conf: str
    settings: AllocatorSettings
    memory_fraction: float | None
    """What set_per_process_memory_fraction was called with; None: it was not."""
    device_total_bytes: int
    device_other_bytes: int
    """In use and not this allocator's."""
    version: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """The request that ended in an OutOfMemoryError."""

    at: int
    requested_bytes: int
    message: str


@dataclass(frozen=True, slots=True)
class GoldenRun:
    """Requests of a golden run; bytes."""

    settings: AllocatorSettings
    version: str
    device_total_bytes: int
    device_used_before_bytes: int
    stat_columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """What one request of a golden run came to."""

    address: int | None
    """Of an allocation; None: OutOfMemoryError, or no allocation."""
    stats: tuple[int | None, ...]
    """In the order of stat_columns; None: this version has no such figure."""


def case_of(told: Any, name: str) -> Case:
    """A case from its JSON; sizes are bytes, `name` is what errors call it.

    Of the versions of PyTorch that `rules_of` knows; the newest where none is told. ReplayError: it is none; SettingsError: its
    settings cannot be read.
    """
    read = _Reader(told, name)
    conf = read.value("conf", str, type(None)) or ""
    fraction = read.value("memory_fraction", int, float, type(None))
    requests = read.value("requests", list)
    for at, request in enumerate(requests):
        if not _is_request(request):
            problem = f"request {at} is {_short(request)}, which is none of a, f, r, s, e with its numbers"
            raise ReplayError(name, problem)
    return Case(
        conf=conf,
        settings=parse_settings(conf),
        memory_fraction=fraction,
        device_total_bytes=read.value("device_total", int),
        device_other_bytes=read.value("device_other", int),
        version=read.version(),
        requests=tuple(requests),
    )


def _is_request(told: Any) -> bool:
    if not isinstance(told, list) or not told or not isinstance(told[0], str):
        return False
    return tuple(map(type, told)) == _SHAPES.get(told[0]) and (told[0] != "a" or 0 <= told[2] < TOO_MANY_BYTES)


def simulator_of(case: Case, *, trace: bool = True) -> Simulator:
    """The allocator of a case before its first request; device memory is one region, the lowest gap taken."""
    device = Device(
        case.device_total_bytes,
        other_bytes=case.device_other_bytes,
        outside_bytes=case.device_other_bytes,
        segments=LowestGap(_CASE_REGION),
    )
    return Simulator(case.settings, device, version=case.version, memory_fraction=case.memory_fraction, trace=trace)


def serve(simulator: Simulator, requests: Iterable[Request], name: str = "requests") -> Failure | None:
    """Ask for each in turn, until one ends in an OutOfMemoryError: which; None where none does.

    Sizes are bytes; as exact, and for the versions of PyTorch, as the simulator is. ReplayError: an id is not an allocation's;
    UndefinedStateError: PyTorch itself would be corrupt.
    """
    addresses: dict[int, int] = {}
    malloc, free = simulator.malloc, simulator.free
    at = -1
    try:
        for at, request in enumerate(requests):  # noqa: B007  the errors say where
            kind = request[0]
            if kind == "a":
                addresses[request[1]] = malloc(request[2], request[3])
            elif kind == "f":
                free(addresses.pop(request[1]))
            elif kind == "r":
                simulator.record_stream(addresses[request[1]], request[2])
            elif kind == "s":
                simulator.catch_up()
            else:
                simulator.empty_cache()
    except OutOfMemoryError as error:
        return Failure(at, error.requested_bytes, str(error))
    except KeyError as error:
        raise ReplayError(name, f"request {at}: nothing with the id {error} is allocated") from error
    return None


def golden_of(lines: Sequence[Any], name: str) -> GoldenRun:
    """A golden run from its lines' JSON; ReplayError where it is none, SettingsError where its settings cannot be read."""
    if not lines:
        raise ReplayError(name, "is empty")
    read = _Reader(lines[0], name)
    columns = read.value("stat_columns", list)
    rows = tuple(line for line in lines[1:] if isinstance(line, dict) and "op" in line)
    return GoldenRun(
        settings=parse_settings(read.value("conf", str)),
        version=read.version(),
        device_total_bytes=read.value("device_total", int),
        device_used_before_bytes=read.value("device_used_before", int),
        stat_columns=tuple(map(str, columns)),
        rows=rows,
    )


def replay_golden(run: GoldenRun, name: str = "golden run") -> tuple[Row, ...]:
    """What each request comes to; after an OutOfMemoryError it goes on.

    Bytes and counts; as exact, and for the versions of PyTorch, as the simulator is. ReplayError: a row asks for what is not known,
    or about an allocation that there is not; UndefinedStateError: PyTorch itself would be corrupt.
    """
    device = Device(
        run.device_total_bytes,
        other_bytes=run.device_used_before_bytes,
        segments=LowestGap(_GOLDEN_SEGMENTS),
        reservations=Rising(_GOLDEN_RESERVATIONS),
    )
    simulator = Simulator(run.settings, device, version=run.version)
    simulator.events_ready = True
    addresses: dict[int, int] = {}
    answers = []
    for at, row in enumerate(run.rows):
        ask = _GOLDEN.get(row["op"]) if isinstance(row["op"], str) else None
        if ask is None:
            raise ReplayError(name, f"row {at} asks for {_short(row['op'])}, which is none of {', '.join(_GOLDEN)}")
        try:
            address = ask(simulator, row, addresses)
        except (KeyError, TypeError) as error:
            raise ReplayError(name, f"row {at} is {_short(dict(row))} ({error})") from error
        stats = {**simulator.stats(), "device_used": device.other_bytes + device.used_bytes}
        answers.append(Row(address, tuple(map(stats.get, run.stat_columns))))
    return tuple(answers)


def _short(told: object) -> str:
    """As Python would write it, cut where it is long."""
    text = repr(told)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _alloc(simulator: Simulator, row: Mapping[str, Any], addresses: dict[int, int]) -> int | None:
    size, stream = row["size"], row["stream"]
    if type(size) is not int or type(stream) is not int or not 0 <= size < TOO_MANY_BYTES:
        raise TypeError("size and stream are whole numbers, a size from 0 on")
    try:
        address = simulator.malloc(size, stream)
    except OutOfMemoryError:
        return None
    addresses[row["id"]] = address
    return address


def _free(simulator: Simulator, row: Mapping[str, Any], addresses: dict[int, int]) -> None:
    simulator.free(addresses.pop(row["id"]))


def _record_stream(simulator: Simulator, row: Mapping[str, Any], addresses: dict[int, int]) -> None:
    simulator.record_stream(addresses[row["id"]], row["stream"])


def _events_ready(simulator: Simulator, row: Mapping[str, Any], addresses: dict[int, int]) -> None:
    simulator.events_ready = bool(row["value"])


def _empty_cache(simulator: Simulator, row: Mapping[str, Any], addresses: dict[int, int]) -> None:
    simulator.empty_cache()


_GOLDEN: dict[Any, Callable[[Simulator, Mapping[str, Any], dict[int, int]], int | None]] = {
    "alloc": _alloc,
    "free": _free,
    "record_stream": _record_stream,
    "events_ready": _events_ready,
    "empty_cache": _empty_cache,
}


class _Reader:
    """Values out of a JSON object, checked."""

    def __init__(self, told: Any, name: str) -> None:
        if not isinstance(told, dict):
            raise ReplayError(name, f"holds a {type(told).__name__} where an object should be")
        self._told, self._name = told, name

    def value(self, key: str, *types: type) -> Any:
        """What is there under the key, of one of these types; None may be left out."""
        value = self._told.get(key)
        if type(value) not in types or (isinstance(value, int | float) and not 0 <= value < TOO_MANY_BYTES):
            wanted = " or ".join(kind.__name__ for kind in types)
            raise ReplayError(self._name, f"{key} is {_short(value)}, not a {wanted}")
        return value

    def version(self) -> str:
        """PyTorch's version; the newest where it is not told."""
        version = self.value("torch", str, type(None)) or NEWEST
        try:
            rules_of(version)
        except ValueError as error:
            raise ReplayError(self._name, str(error)) from error
        return str(version)
