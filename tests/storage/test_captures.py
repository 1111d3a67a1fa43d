"""What every backend promises of captures (`allocscope.storage.captures`), each promise tried on each of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from allocscope.model import Capture, CaptureOrder, CaptureReason, Device
from allocscope.storage.repository import (
    BadCursor,
    CaptureArrival,
    CaptureRecord,
    CaptureState,
    CaptureTotals,
    Dropped,
    Kept,
    OrderedLately,
    OrderLimits,
    ProcessRecord,
    TooManyOrders,
    Unstorable,
    UploadLost,
)
from tests.storage.made import LARGEST, UUID, batch, process

NO_LIMIT = LARGEST
PLENTY = OrderLimits(of_process=1000, of_job=1000, of_fleet=1000)


def id_of(number: int) -> str:
    return f"{number:032x}"


def ordered(number: int = 1, **more) -> CaptureRecord:
    given = {"reason": CaptureReason.ASKED, "state": CaptureState.ORDERED, "ordered_us": 100 + number, **more}
    return CaptureRecord(id_of(number), given.pop("process_id", "p1"), given.pop("job", "train"), "n1", **given)


def capture(number: int = 1, **more) -> Capture:
    given = {"reason": CaptureReason.OOM, "device_uuid": UUID, "snapshot_bytes": 1000, "history_entries": 0, **more}
    return Capture(id_of(number), given.pop("process_id", "p1"), 70, **given)


def arrival(number: int = 1, **more) -> CaptureArrival:
    given = {"capture": capture(number), "process": process(rank=3), "node": "n1", "received_us": 1000 + number, **more}
    return CaptureArrival(**given)


def bring(repository, number: int = 1, *pieces: bytes, limit_bytes: int = NO_LIMIT, **more) -> Kept:
    """As a collector does it."""
    pieces = pieces or (b"piece %d" % number,)
    upload = repository.captures.begin(id_of(number), received_us=1000 + number)
    for at, piece in enumerate(pieces):
        repository.captures.add(upload, at, piece, received_us=1000 + number)
    came = arrival(number, upload=upload, piece_count=len(pieces), stored_bytes=sum(map(len, pieces)), **more)
    kept: Kept = repository.captures.keep(came, limit_bytes=limit_bytes)
    return kept


def content(repository, number: int = 1) -> list[bytes]:
    found: list[bytes] = []
    while (piece := repository.captures.piece(id_of(number), len(found))) is not None:
        found.append(piece)
    return found


def state(repository, number: int = 1) -> tuple[CaptureState, str | None]:
    record = repository.captures.find(id_of(number))
    return record.state, record.problem


class TestOrders:
    def test_an_order_is_open_until_it_is_answered(self, repository):
        first, second = (
            ordered(1, rank=3, device_uuid=UUID, tensors=True, history_us=5, most_history_entries=9),
            ordered(2),
        )
        repository.captures.order([first, second], PLENTY)
        assert repository.captures.open_orders() == (first, second)
        assert first.order == CaptureOrder(id_of(1), UUID, 5, 9, True, CaptureReason.ASKED)
        repository.captures.sent([id_of(1)], sent_us=200)
        assert repository.captures.open_orders() == (replace(first, state=CaptureState.SENT, sent_us=200), second)
        assert bring(repository, 1) == Kept(is_new=True)
        assert repository.captures.open_orders() == (second,)
        assert repository.captures.open_orders(limit=1) == (second,)

    def test_one_that_is_given_twice_is_one(self, repository):
        repository.captures.order([ordered(1)], PLENTY)
        repository.captures.sent([id_of(1)], sent_us=200)
        repository.captures.order([ordered(1)], PLENTY)
        assert [record.state for record in repository.captures.open_orders()] == [CaptureState.SENT]

    def test_one_that_is_given_up_says_why_and_may_still_be_answered(self, repository):
        repository.captures.order([ordered(1), ordered(2)], PLENTY)
        assert repository.captures.fail({id_of(1): "its node is away"}) == 1
        assert state(repository, 1) == (CaptureState.FAILED, "its node is away")
        assert repository.captures.open_orders() == (ordered(2),)
        assert bring(repository, 1).is_new
        assert state(repository, 1) == (CaptureState.KEPT, None)

    def test_what_was_answered_is_not_given_up_or_sent(self, repository):
        repository.captures.order([ordered(1)], PLENTY)
        bring(repository, 1)
        assert repository.captures.fail({id_of(1): "too late", id_of(7): "unknown"}) == 0
        repository.captures.sent([id_of(1)], sent_us=200)
        assert state(repository, 1) == (CaptureState.KEPT, None)

    def test_nothing_to_do_is_done(self, repository):
        repository.captures.order([], PLENTY)
        repository.captures.sent([], sent_us=1)
        assert repository.captures.fail({}) == 0
        assert repository.captures.open_orders() == ()

    @pytest.mark.parametrize(
        ("limits", "says"),
        [
            (replace(PLENTY, of_process=1), "2 captures of process p1 would be on order, and at most 1 may be"),
            (replace(PLENTY, of_job=2), "3 captures of job 'train' would be on order, and at most 2 may be"),
            (replace(PLENTY, of_fleet=3), "4 captures of the fleet would be on order, and at most 3 may be"),
        ],
    )
    def test_more_than_the_limits_allow_are_refused_together(self, repository, limits, says):
        repository.captures.order([ordered(1), ordered(2, process_id="p9", job="other")], PLENTY)
        more = [ordered(3), ordered(4, process_id="p2")]
        with pytest.raises(TooManyOrders, match=says):
            repository.captures.order(more, limits)
        assert len(repository.captures.open_orders()) == 2

    def test_limits_count_what_is_open_of_the_same_reason(self, repository):
        repository.captures.order([ordered(1), ordered(2)], PLENTY)
        bring(repository, 1)
        repository.captures.order([ordered(3, reason=CaptureReason.FORECAST)], replace(PLENTY, of_process=1))
        repository.captures.order([ordered(4)], replace(PLENTY, of_process=2))
        assert [record.capture_id for record in repository.captures.open_orders()] == [id_of(2), id_of(3), id_of(4)]

    def test_an_allocator_gets_no_further_one_for_a_while(self, repository):
        foreseen = {"reason": CaptureReason.FORECAST}
        repository.captures.order([ordered(1, device_uuid=UUID, **foreseen)], PLENTY)
        bring(repository, 1, capture=capture(1, **foreseen))
        lately = replace(PLENTY, not_since_us=101)
        with pytest.raises(OrderedLately, match=f"was ordered a moment ago: {id_of(1)}"):
            repository.captures.order([ordered(2, device_uuid=UUID, **foreseen)], lately)
        repository.captures.order([ordered(3, device_uuid="GPU-2", **foreseen)], lately)
        repository.captures.order([ordered(4, device_uuid=UUID)], lately)
        repository.captures.order([ordered(5, device_uuid=UUID, **foreseen)], replace(PLENTY, not_since_us=102))

    def test_several_collectors_order_no_more_than_the_limits_allow(self, backend):
        repositories = [backend.open(), backend.open()]
        ready = threading.Barrier(4)

        def order(number: int) -> bool:
            ready.wait(timeout=30)
            try:
                repositories[number % 2].captures.order([ordered(number)], replace(PLENTY, of_fleet=2))
            except TooManyOrders:
                return False
            return True

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(order, range(4))) == 2
        assert len(repositories[0].captures.open_orders()) == 2


class TestArrivals:
    def test_a_capture_that_nobody_ordered_is_there_with_all_that_is_known(self, repository):
        assert bring(repository, 1, b"one", b"two") == Kept(is_new=True)
        assert repository.captures.find(id_of(1)) == CaptureRecord(
            id_of(1),
            "p1",
            "train",
            "n1",
            CaptureReason.OOM,
            CaptureState.KEPT,
            rank=3,
            device_uuid=UUID,
            time_us=70,
            received_us=1001,
            snapshot_bytes=1000,
            history_entries=0,
            stored_bytes=6,
        )
        assert content(repository) == [b"one", b"two"]
        assert repository.captures.totals() == CaptureTotals(1, 6)
        assert repository.captures.find(id_of(2)) is None

    def test_one_that_was_ordered_says_what_was_and_what_came(self, repository):
        order = ordered(1, history_us=5, most_history_entries=9, tensors=True)
        repository.captures.order([order], PLENTY)
        came = capture(1, reason=CaptureReason.ASKED, tensors=False, history_entries=7, problem="no tensors: no torch")
        bring(repository, 1, capture=came)
        assert repository.captures.find(id_of(1)) == replace(
            order,
            state=CaptureState.KEPT,
            rank=3,
            device_uuid=UUID,
            tensors=False,
            time_us=70,
            received_us=1001,
            snapshot_bytes=1000,
            history_entries=7,
            stored_bytes=7,
            problem="no tensors: no torch",
        )

    def test_one_without_a_snapshot_has_failed_and_says_why(self, repository):
        came = arrival(1, capture=capture(1, snapshot_bytes=None, problem="the process was killed"))
        assert repository.captures.keep(came, limit_bytes=NO_LIMIT) == Kept(is_new=True)
        record = repository.captures.find(id_of(1))
        assert (record.state, record.problem, record.stored_bytes) == (
            CaptureState.FAILED,
            "the process was killed",
            None,
        )
        assert content(repository) == []
        bring(repository, 1)
        assert state(repository) == (CaptureState.KEPT, None)

    def test_the_first_snapshot_stays(self, repository):
        assert bring(repository, 1, b"first") == Kept(is_new=True)
        assert bring(repository, 1, b"second") == Kept(is_new=False)
        nothing = arrival(1, capture=capture(1, snapshot_bytes=None, problem="gone"))
        assert repository.captures.keep(nothing, limit_bytes=NO_LIMIT) == Kept(is_new=False)
        assert content(repository) == [b"first"]
        assert state(repository) == (CaptureState.KEPT, None)
        assert repository.captures.totals() == CaptureTotals(1, 5)

    def test_two_at_once_under_one_id_are_one(self, backend):
        repositories = [backend.open(), backend.open()]
        ready = threading.Barrier(4)

        def send(sender: int) -> bool:
            ready.wait(timeout=30)
            return bring(repositories[sender % 2], 1, *(b"%d" % sender * 10 for _ in range(20))).is_new

        with ThreadPoolExecutor(4) as pool:
            new = list(pool.map(send, range(4)))
        assert sum(new) == 1
        assert content(repositories[0]) == [b"%d" % new.index(True) * 10] * 20

    def test_nothing_of_it_is_seen_before_it_is_whole(self, repository):
        upload = repository.captures.begin(id_of(1), received_us=1)
        repository.captures.add(upload, 0, b"piece", received_us=1)
        assert repository.captures.find(id_of(1)) is None
        assert content(repository) == []
        assert repository.captures.page().items == ()
        assert repository.captures.totals() == CaptureTotals(0, 0)

    @pytest.mark.parametrize(
        "told", [{"piece_count": 2, "stored_bytes": 5}, {"piece_count": 1, "stored_bytes": 4}], ids=["pieces", "bytes"]
    )
    def test_one_whose_pieces_are_not_all_there_is_to_be_sent_again(self, repository, told):
        upload = repository.captures.begin(id_of(1), received_us=1)
        repository.captures.add(upload, 0, b"piece", received_us=1)
        with pytest.raises(UploadLost, match="send the capture again"):
            repository.captures.keep(arrival(1, upload=upload, **told), limit_bytes=NO_LIMIT)
        assert repository.captures.find(id_of(1)) is None
        assert repository.process("p1") is None

    def test_one_that_cannot_be_kept_leaves_nothing(self, repository):
        upload = repository.captures.begin(id_of(1), received_us=1)
        repository.captures.add(upload, 0, b"piece", received_us=1)
        odd = arrival(1, upload=upload, piece_count=1, stored_bytes=5, capture=capture(1, snapshot_bytes=LARGEST + 1))
        with pytest.raises(Unstorable):
            repository.captures.keep(odd, limit_bytes=NO_LIMIT)
        assert repository.captures.find(id_of(1)) is repository.process("p1") is None

    def test_what_was_discarded_is_lost(self, repository):
        upload = repository.captures.begin(id_of(1), received_us=1)
        for number in range(20):
            repository.captures.add(upload, number, b"piece", received_us=1)
        repository.captures.discard(upload)
        with pytest.raises(UploadLost):
            repository.captures.add(upload, 20, b"piece", received_us=1)
        with pytest.raises(UploadLost):
            repository.captures.keep(arrival(1, upload=upload, piece_count=20, stored_bytes=100), limit_bytes=NO_LIMIT)

    def test_what_is_kept_is_not_discarded(self, repository):
        upload = repository.captures.begin(id_of(1), received_us=1)
        repository.captures.add(upload, 0, b"piece", received_us=1)
        came = arrival(1, upload=upload, piece_count=1, stored_bytes=5)
        repository.captures.keep(came, limit_bytes=NO_LIMIT)
        repository.captures.discard(upload)
        with pytest.raises(UploadLost):
            repository.captures.add(upload, 1, b"more", received_us=1)
        assert content(repository) == [b"piece"]

    def test_a_process_that_nobody_described_is_known_by_its_capture(self, repository):
        devices = (Device(UUID, 0, "H200", 100),)
        bring(repository, 1, process=process(devices=devices, job="été 🚀"))
        assert repository.process("p1") == ProcessRecord(process(devices=devices, job="été 🚀"), "n1", 1001, 1001, None)
        assert repository.job("été 🚀").process_count == 1

    def test_a_process_is_as_its_batches_describe_it(self, repository):
        described = process(devices=(Device(UUID, 0),))
        bring(repository, 1)
        repository.store([batch(1, processes=(described,), received_us=2000)])
        assert repository.process("p1") == ProcessRecord(described, "n1", 1001, 2000, None)
        bring(repository, 2)
        assert repository.process("p1") == ProcessRecord(described, "n1", 1001, 2000, None)


class TestBounds:
    def test_the_oldest_make_room_and_say_so(self, repository):
        for number in (1, 2, 3):
            assert bring(repository, number, b"x" * 10, limit_bytes=30) == Kept(is_new=True)
        assert bring(repository, 4, b"x" * 15, limit_bytes=30) == Kept(is_new=True, dropped=Dropped(for_room=2))
        gone = (CaptureState.DROPPED, "its snapshot was dropped to make room for newer ones")
        assert [state(repository, number) for number in (1, 2, 3, 4)] == [gone, gone, *[(CaptureState.KEPT, None)] * 2]
        assert content(repository, 1) == []
        assert content(repository, 3) == [b"x" * 10]
        assert repository.captures.totals() == CaptureTotals(2, 25)
        assert repository.captures.find(id_of(1)).snapshot_bytes == 1000, "what was in it is still known"

    def test_one_that_was_dropped_does_not_come_again(self, repository):
        bring(repository, 1)
        bring(repository, 2, limit_bytes=10)
        assert bring(repository, 1) == Kept(is_new=False)
        assert state(repository, 1)[0] is CaptureState.DROPPED
        assert repository.captures.totals().captures == 1

    def test_the_newest_stays_whatever_its_size(self, repository):
        bring(repository, 1)
        assert bring(repository, 2, b"x" * 100, limit_bytes=10).dropped == Dropped(for_room=1)
        assert content(repository, 2) == [b"x" * 100]

    def test_pruning_drops_by_age_and_by_size(self, repository):
        for number in range(1, 6):
            bring(repository, number, b"x" * 10)
        assert repository.captures.prune(before_us=1002, limit_bytes=30, abandoned_before_us=0) == Dropped(
            for_age=1, for_room=1
        )
        assert [state(repository, number)[0].value for number in range(1, 6)] == ["dropped"] * 2 + ["kept"] * 3
        assert state(repository, 1)[1] == "its snapshot was dropped for its age"
        assert repository.captures.prune(before_us=1002, limit_bytes=30, abandoned_before_us=0) == Dropped()

    def test_uploads_that_nobody_completes_go_and_others_stay(self, repository):
        abandoned = repository.captures.begin(id_of(1), received_us=10)
        alive = repository.captures.begin(id_of(2), received_us=10)
        for number in range(20):
            repository.captures.add(abandoned, number, b"piece", received_us=10)
        repository.captures.add(alive, 0, b"piece", received_us=20)
        repository.captures.prune(before_us=0, limit_bytes=NO_LIMIT, abandoned_before_us=20)
        with pytest.raises(UploadLost):
            repository.captures.add(abandoned, 20, b"piece", received_us=30)
        came = arrival(2, upload=alive, piece_count=1, stored_bytes=5)
        assert repository.captures.keep(came, limit_bytes=NO_LIMIT).is_new


class TestLists:
    def test_are_found_by_job_process_and_state_the_latest_first(self, repository):
        repository.captures.order([ordered(1), ordered(2, job="other", process_id="p2"), ordered(3)], PLENTY)
        bring(repository, 3)
        listed = lambda **by: [record.capture_id for record in repository.captures.page(**by).items]  # noqa: E731
        assert listed() == [id_of(3), id_of(2), id_of(1)]
        assert listed(job="train") == [id_of(3), id_of(1)]
        assert listed(process_id="p2") == [id_of(2)]
        assert listed(state=CaptureState.ORDERED) == [id_of(2), id_of(1)]
        assert listed(state=CaptureState.KEPT, job="train") == [id_of(3)]

    def test_page_and_neither_repeat_nor_hide_when_more_comes(self, repository):
        repository.captures.order([ordered(number) for number in range(1, 6)], PLENTY)
        seen, cursor = [], None
        while True:
            page = repository.captures.page(cursor=cursor, limit=2)
            seen += [record.capture_id for record in page.items]
            bring(repository, 1)  # what is answered keeps its place
            repository.captures.order([ordered(90 + len(seen))], PLENTY)
            cursor = page.next_cursor
            if cursor is None:
                break
        assert seen == [id_of(number) for number in (5, 4, 3, 2, 1)]

    def test_a_cursor_of_another_list_is_refused(self, repository):
        with pytest.raises(BadCursor):
            repository.captures.page(cursor="WyJqb2JzIiwgMV0")
