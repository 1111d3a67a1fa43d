"""Storing together, and what happens when the database does not take it."""

import asyncio
import threading

import pytest

from allocscope.collector.observation import Observation
from allocscope.collector.writer import Arrival, Budget, Writer
from allocscope.model import Event, EventKind, chunks, wire
from allocscope.storage.errors import StorageBusy, StorageFull, Unstorable
from allocscope.storage.records import Stored
from tests.collector.harness import batch, ref, sample

WITHIN_S = 10


class Store:
    """A database that says what it is told to say; calls past that wait for `go`."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []
        self.kept = set()
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def store(self, batches):
        self.calls.append([one.sequence for one in batches])
        self.entered.release()
        assert self.go.acquire(timeout=WITHIN_S)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer(batches)
        self.kept |= {number for one in batches for chunk in one.chunks for number in chunk.sequence}
        self.kept |= {event.sequence for one in batches for event in one.events}
        return Stored(sum(len(chunk) for one in batches for chunk in one.chunks), 0, 0, 0)


class Bench:
    """A writer, and what it acknowledged."""

    def __init__(self, store, **more):
        self.store, self.observation, self.handed_on = store, Observation(), []
        self.acknowledged: asyncio.Queue[int] = asyncio.Queue()
        self.refused: dict[int, list[tuple[str, int]]] = {}
        given = {"queue_bytes": 1 << 20, "commit_batches": 8, **more}
        self.writer = Writer(store, self.observation, stored=self._hand_on, **given)
        self.writer.start()

    def _hand_on(self, batches, refused):
        self.handed_on += [one.sequence for one in batches]

    def _done(self, sequence, refused):
        self.refused[sequence] = [(r.reason, r.count) for r in refused]
        self.acknowledged.put_nowait(sequence)

    async def put(self, sequence, *numbers, late=False, **more):
        claimed = batch(sequence, *(sample(n) for n in numbers or (sequence,)), **more)
        await self.writer.put(Arrival(claimed, "n1", "d1", 1, self._done, late=late))

    async def entered(self):
        assert await asyncio.to_thread(self.store.entered.acquire, timeout=WITHIN_S)

    async def acknowledgements(self, count):
        return [await asyncio.wait_for(self.acknowledged.get(), WITHIN_S) for _ in range(count)]

    def value(self, name, **labels):
        return self.observation.registry.get_sample_value(name, labels)


async def test_what_waits_is_stored_in_one_transaction_and_then_acknowledged():
    store = Store()
    bench = Bench(store, commit_batches=3)
    await bench.put(1)
    await bench.entered()
    for sequence in range(2, 7):
        await bench.put(sequence)
    assert bench.acknowledged.empty()
    for _ in range(3):
        store.go.release()
    assert await bench.acknowledgements(6) == [1, 2, 3, 4, 5, 6]
    assert store.calls == [[1], [2, 3, 4], [5, 6]]
    assert bench.handed_on == [1, 2, 3, 4, 5, 6]
    assert bench.value("allocscope_samples_ingested_total") == 6
    await bench.writer.close(WITHIN_S)


@pytest.mark.parametrize("error", [StorageBusy("locked"), StorageFull("no room left")], ids=["busy", "full"])
async def test_what_the_database_does_not_take_is_not_acknowledged_and_tried_again(error):
    store = Store(error, error)
    bench = Bench(store)
    await bench.put(1)
    await bench.entered()
    store.go.release()
    await bench.entered()
    assert bench.acknowledged.empty()
    assert bench.writer.failing == str(error)
    assert bench.handed_on == []
    store.go.release()
    store.go.release()
    assert await bench.acknowledgements(1) == [1]
    assert store.calls == [[1], [1], [1]]
    assert bench.value("allocscope_store_failures_total") == 2
    await bench.writer.close(WITHIN_S)
    assert bench.writer.failing is None


def event(sequence):
    return Event(ref(1).process_id, sequence, 1, EventKind.DROPPED, dropped_count=1)


def refusing(number, error):
    """A store that does not take the sample of that number, nor anything with it."""

    def answer(batches):
        if any(number in chunk.sequence for one in batches for chunk in one.chunks):
            raise error

    return answer


async def test_of_a_batch_only_what_cannot_be_kept_is_refused():
    store = Store(None, *[refusing(31, Unstorable("odd"))] * 20)
    bench = Bench(store)
    await bench.put(1)
    await bench.entered()
    bad_and_good = [wire.chunk_to_wire(one) for n in (30, 40) for one in chunks(ref(1), map(sample, (n, n + 1)))]
    await bench.put(2)
    await bench.put(3, samples=bad_and_good, events=[wire.event_to_wire(event(50))])
    await bench.put(4)
    for _ in range(30):
        store.go.release()
    assert await bench.acknowledgements(4) == [1, 2, 3, 4]
    assert bench.refused == {1: [], 2: [], 3: [("not_storable", 2)], 4: []}
    assert bench.handed_on == [1, 2, 3, 4]
    assert store.kept == {1, 2, 40, 41, 50, 4}
    assert bench.value("allocscope_samples_rejected_total", reason="not_storable") == 2
    await bench.writer.close(WITHIN_S)


async def test_no_piece_acknowledges_its_batch_before_the_rest_is_stored():
    store = Store(*[refusing(31, Unstorable("odd"))] * 20)
    bench = Bench(store)
    await bench.put(7, 31)
    for _ in range(30):
        store.go.release()
    assert await bench.acknowledgements(1) == [7]
    assert [set(call) for call in store.calls] == [{7}, {6}, {6}, {6}, {7}]
    await bench.writer.close(WITHIN_S)


async def test_a_defect_of_ours_is_tried_again_and_then_costs_what_it_is_about_only(monkeypatch):
    monkeypatch.setattr("allocscope.collector.writer.FIRST_PAUSE_S", 0.0)
    store = Store(None, *[refusing(2, KeyError("ours"))] * 20)
    bench = Bench(store)
    await bench.put(1)
    await bench.entered()
    for sequence in (2, 3):
        await bench.put(sequence)
    for _ in range(30):
        store.go.release()
    assert await bench.acknowledgements(3) == [1, 2, 3]
    assert store.calls[:7] == [[1], [2, 3], [2], [2], [2], [2], [2]]
    assert store.calls[-1] == [3]
    assert bench.refused == {1: [], 2: [("not_storable", 1)], 3: []}
    assert bench.writer.failing is None
    await bench.writer.close(WITHIN_S)


async def test_who_brings_more_than_may_wait_waits():
    store = Store()
    claimed_bytes = batch(1, sample(1)).ByteSize()
    bench = Bench(store, queue_bytes=2 * claimed_bytes)
    await bench.put(1)
    await bench.put(2)
    third = asyncio.create_task(bench.put(3))
    await bench.entered()
    assert not third.done()
    store.go.release()
    store.go.release()
    store.go.release()
    assert await bench.acknowledgements(3) == [1, 2, 3]
    await third
    await bench.writer.close(WITHIN_S)


async def test_at_the_end_what_waits_is_still_stored():
    store = Store()
    bench = Bench(store)
    for sequence in (1, 2, 3):
        await bench.put(sequence)
    store.go.release()
    store.go.release()
    store.go.release()
    await bench.writer.close(WITHIN_S)
    assert [sequence for call in store.calls for sequence in call] == [1, 2, 3]


async def test_the_end_comes_also_where_the_database_takes_nothing():
    store = Store(*[StorageBusy("locked")] * 1000)
    for _ in range(1000):
        store.go.release()
    bench = Bench(store)
    await bench.put(1)
    await bench.entered()
    await bench.writer.close(0.01)
    assert bench.acknowledged.empty()


async def test_a_budget_serves_in_turn_and_survives_those_who_leave():
    budget = Budget(10)
    assert await budget.take(25) == 10  # larger than everything: alone
    first, second = asyncio.create_task(budget.take(6)), asyncio.create_task(budget.take(4))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    budget.give_back(10)
    assert await asyncio.wait_for(second, WITHIN_S) == 4
    assert await asyncio.wait_for(budget.take(6), WITHIN_S) == 6


async def test_what_is_late_gets_the_room_that_is_left_and_is_written_before_what_is_new():
    bench = Bench(Store(), commit_batches=4)
    await bench.put(100)
    await bench.entered()
    for sequence in (1, 2, 3):
        await bench.put(sequence, late=True)
    await bench.put(101)
    await bench.put(102)
    for _ in range(3):
        bench.store.go.release()
    await bench.acknowledgements(6)
    await bench.writer.close(WITHIN_S)
    assert bench.store.calls == [[100], [1, 2, 101, 102], [3]]


async def test_what_is_late_waits_while_there_is_no_time_for_it_and_holds_up_nobody():
    time_for_it = threading.Event()
    bench = Bench(Store(), queue_bytes=8000, may_take_late=time_for_it.is_set)
    await bench.put(1, *range(1, 60), late=True)
    waiting = asyncio.create_task(bench.put(2, *range(60, 120), late=True))
    await bench.put(100)
    await bench.entered()
    bench.store.go.release()
    assert await bench.acknowledgements(1) == [100]
    assert not waiting.done()
    time_for_it.set()
    for _ in range(3):
        bench.store.go.release()
    assert await bench.acknowledgements(2) == [1, 2]
    await bench.writer.close(WITHIN_S)
