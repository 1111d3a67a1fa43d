"""What a note tells goes into the batches as if the stream had brought it: what it brought already does not, what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from allocscope.daemon.capture_folder import CaptureFolder
from allocscope.daemon.intake import Intake
from allocscope.daemon.node import Node
from allocscope.daemon.notes import Figures, OnDisk, ReadNote, read_note
from allocscope.daemon.observed import Observed
from allocscope.model import BlockGroup, BlockMap, CaptureNote, Device, Pool
from allocscope.model.wire import note_from_wire, note_to_wire, process_to_wire
from allocscope.proto.v1 import identity_pb2
from tests.daemon.capture_fakes import note
from tests.daemon.fakes import GIB, acknowledge, process

GROUP = BlockGroup(Pool.LARGE, 0, None, False, 1, 2048, 1000, 24, 1024, 0, 1024, 0, 0, (), (), ())


class Here:
    """A node's intake, and what it closes."""

    def __init__(self) -> None:
        self.node, self.observed = Node(), Observed()
        self.intake = Intake(lambda: None)
        self.figures = Figures(self.node, self.intake, self.observed, lambda _: 80 * GIB)

    def attach(self, seen: int, **changes) -> None:
        attached = self.node.attach(process(**changes), process_to_wire(process(**changes)), "stream", 0)
        attached.seen = seen

    async def bring(self, left: CaptureNote) -> OnDisk:
        message = note_to_wire(left)
        return await self.figures.bring(ReadNote(message, note_from_wire(message), 1))

    def told(self) -> tuple[list[int], list[int], list[int], list[identity_pb2.Process]]:
        """Numbers of samples, maps and events, and the processes that are introduced."""
        (closed,) = self.intake.close(1, 1)
        self.closed, batch = closed, closed.batch
        samples = [number for chunk in batch.samples for number in chunk.sequence]
        maps = [each.sequence for each in batch.block_maps]
        return samples, maps, [event.sequence for event in batch.events], list(batch.processes)


def whole_note(**changes) -> CaptureNote:
    """Sample 7, event 8, map 9."""
    return replace(note(process(**changes)), block_map=BlockMap(9, 5, (GROUP,)))


@pytest.mark.parametrize(
    ("seen", "told"),
    [(None, ([7], [9], [8])), (6, ([7], [9], [8])), (7, ([], [9], [8])), (8, ([], [9], [])), (9, ([], [], []))],
)
async def test_what_the_stream_brought_is_not_brought_again(seen, told):
    here = Here()
    if seen is not None:
        here.attach(seen)
    await here.bring(whole_note())
    assert here.told() == (*told, [process_to_wire(process())])


async def test_it_is_on_disk_when_its_batch_is():
    here = Here()
    on_disk = await here.bring(whole_note())
    here.told()
    assert not on_disk.is_set()
    acknowledge(here.closed)
    assert on_disk.is_set()


async def test_the_newer_introduction_counts_unless_the_note_knows_one_more_device():
    more = (*process().devices, Device("GPU-2", 1))
    here = Here()
    here.attach(0, rank=1)
    await here.bring(note(process()))
    assert here.told()[3] == [process_to_wire(process(rank=1))]
    await here.bring(note(process(devices=more)))
    assert here.told()[3] == [process_to_wire(process(devices=more))]


async def test_a_map_of_too_much_is_left_out_and_the_rest_of_its_note_stays():
    message = note_to_wire(whole_note())
    message.block_map.groups.extend(message.block_map.groups[:1] * 4096)

    class Folder:
        def read_note(self, _: str) -> tuple[bytes, int]:
            return message.SerializeToString(), 1

    here, capture_id = Here(), message.capture.capture_id
    await here.figures.bring(read_note(cast("CaptureFolder", Folder()), capture_id))
    assert here.told()[:3] == ([7], [], [8])
    refused = {"reason": "too_many_groups"}
    assert here.observed.registry.get_sample_value("allocscope_samples_rejected_total", refused) == 1


async def test_each_figure_is_judged_for_itself():
    here, left = Here(), whole_note()
    assert left.samples
    assert left.event
    lie = replace(
        left,
        samples=replace(left.samples, columns={**left.samples.columns, "reserved_bytes": (81 * GIB,)}),
        event=replace(left.event, device_uuid="GPU-9"),
    )
    await here.bring(lie)
    assert here.told()[:3] == ([], [9], [])
    refused = [
        here.observed.registry.get_sample_value("allocscope_samples_rejected_total", {"reason": reason})
        for reason in ("out_of_range", "unknown_device")
    ]
    assert refused == [1, 1]
