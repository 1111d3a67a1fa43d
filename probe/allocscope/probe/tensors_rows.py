"""Makes a report's rows, groups and totals of what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from allocscope.model.tensors import (
    DeviceTensors,
    Holder,
    HolderKind,
    KindTotal,
    StorageRow,
    TensorGroup,
    TensorKind,
    View,
)
from allocscope.probe.tensors_holders import Holders
from allocscope.probe.tensors_modules import Modules
from allocscope.probe.tensors_names import Name
from allocscope.probe.tensors_pace import Pace
from allocscope.probe.tensors_scan import Catalogue, Found, Saved

MOST_ROWS = 5_000
MOST_GROUPS = 2_000
MOST_HOLDERS = 8
"""Of one Storage, told."""
MOST_ROOTS = 100
"""One beyond another."""
OTHERS = "(others)"
"""The holder of groups put together because there are too many."""
_Group = tuple[TensorKind, "str | None", "str | None", "View | None"]
_ORDER = {kind: place for place, kind in enumerate(TensorKind)}


class Rows:
    """What the storages of a catalogue are, and whose."""

    def __init__(self, found: Catalogue, modules: Modules, holders: Holders, pace: Pace) -> None:
        self._holders, self._wrapped, self._beyond, self._pace = holders, found.wrapped, found.beyond, pace
        self._kinds = (
            (found.parameters | modules.parameters.keys(), TensorKind.PARAMETER),
            (modules.buffers, TensorKind.BUFFER),
            (found.gradients, TensorKind.GRADIENT),
            (modules.states, TensorKind.OPTIMIZER_STATE),
        )

    def of(self, storages: Iterable[Found]) -> Iterator[StorageRow]:
        """One row each, those of most bytes first; without holders once the time is up."""
        for found in sorted(storages, key=lambda found: -found.bytes):
            if self._pace.is_over():
                self._pace.leave_out("holders of the smallest storages: no time was left")
                yield self._row(found, [])
            else:
                yield self._row(found, self._told_holders(found))

    def _row(self, found: Found, holders: list[Holder]) -> StorageRow:
        more = sum(map(self._holders.more, found.tensors)) + found.more_saved + len(holders[MOST_HOLDERS:])
        return StorageRow(
            found.device_index,
            found.address,
            found.bytes,
            self._kind(found),
            found.tensor_count,
            found.views,
            found.more_views,
            tuple(holders[:MOST_HOLDERS]),
            more,
        )

    def _kind(self, found: Found) -> TensorKind:
        ids = [*found.tensors, *(self._wrapped[one] for one in found.tensors if one in self._wrapped)]
        for known, kind in self._kinds:
            if any(one in known for one in ids):
                return kind
        return TensorKind.ACTIVATION if found.saved else TensorKind.OTHER

    def _told_holders(self, found: Found) -> list[Holder]:
        """Those with names first, then autograd, then objects that nobody was found to hold."""
        told = [holder for one in found.tensors for holder in self._holders.holders(one)]
        told += map(self._of_saved, found.saved)
        if len(told) > 1:
            told.sort(key=lambda holder: holder.kind is HolderKind.OBJECT)
            told = [holder for place, holder in enumerate(told) if holder not in told[:place]]
        return told

    def _of_saved(self, saved: Saved) -> Holder:
        root = self._root(saved.root)
        packed = "packed " if saved.packed else ""
        path = f"{packed}{saved.node}.{saved.attribute} from {root.path if root else 'a tensor without a name'}"
        if root is None:
            return Holder(HolderKind.AUTOGRAD, path)
        return Holder(HolderKind.AUTOGRAD, path, root.place, root.container, root.line)

    def _root(self, root: int) -> Name | None:
        """The name of a tensor that leads to a node: if that one has none, of one that leads to it."""
        for _ in range(MOST_ROOTS):
            name = self._holders.name(root)
            if name is not None or root not in self._beyond:
                return name
            root = self._beyond[root]
        return None


class Summary:
    """Told the rows one after another, it keeps the first, and sums up all."""

    def __init__(self, requested_bytes: Mapping[int, int]) -> None:
        self.rows: list[StorageRow] = []
        self.more_rows = self.more_rows_bytes = 0
        self._requested = requested_bytes
        self._groups: dict[_Group, list[int]] = defaultdict(lambda: [0, 0])
        self._totals: dict[tuple[int, TensorKind], list[int]] = defaultdict(lambda: [0, 0])
        self._found: dict[int, int] = defaultdict(int)

    def add(self, row: StorageRow) -> None:
        if len(self.rows) < MOST_ROWS:
            self.rows.append(row)
        else:
            self.more_rows += 1
            self.more_rows_bytes += row.bytes
        for one in (self._groups[_group(row)], self._totals[row.device_index, row.kind]):
            one[0] += 1
            one[1] += row.bytes
        self._found[row.device_index] += row.bytes

    def groups(self) -> tuple[TensorGroup, ...]:
        """Rows that are held alike and look alike, as one each; beyond the largest few thousand as one a kind."""
        groups = sorted((TensorGroup(*key, *one) for key, one in self._groups.items()), key=lambda group: -group.bytes)
        return (*groups[:MOST_GROUPS], *_together(groups[MOST_GROUPS:]))

    def devices(self) -> tuple[DeviceTensors, ...]:
        """Each device with tensors, or whose allocator says that it has requests."""
        used = {index for index, requested in self._requested.items() if requested}
        return tuple(map(self._device, sorted(self._found.keys() | used)))

    def _device(self, index: int) -> DeviceTensors:
        requested = self._requested.get(index)
        not_held = None if requested is None else max(requested - self._found[index], 0)
        return DeviceTensors(index, self._found[index], requested, not_held)

    def totals(self) -> tuple[KindTotal, ...]:
        """By device and kind; what nothing was found for comes last of a device."""
        totals = [KindTotal(device, kind, one[1], one[0]) for (device, kind), one in self._totals.items()]
        totals += [
            KindTotal(device.device_index, TensorKind.NOT_HELD, device.not_held_bytes)
            for device in self.devices()
            if device.not_held_bytes is not None
        ]
        return tuple(sorted(totals, key=lambda total: (total.device_index, _ORDER[total.kind])))


def _group(row: StorageRow) -> _Group:
    holder = row.holders[0] if row.holders else None
    view = row.views[0] if row.views else None
    return row.kind, holder.pattern if holder else None, holder.place if holder else None, view


def _together(groups: list[TensorGroup]) -> Iterator[TensorGroup]:
    for kind in dict.fromkeys(group.kind for group in groups):
        those = [group for group in groups if group.kind is kind]
        count, bytes_ = sum(g.storage_count for g in those), sum(g.bytes for g in those)
        yield TensorGroup(kind, OTHERS, None, None, count, bytes_)
