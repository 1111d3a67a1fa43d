"""What every backend promises (`allocscope.storage.repository`), each promise tried on each of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allocscope.model import (
    COLUMNS,
    AllocatorRef,
    BlockMap,
    Cause,
    Device,
    Event,
    EventKind,
    Forecast,
    Line,
    Sample,
    State,
    chunks,
)
from allocscope.storage.repository import (
    AlertRecord,
    BadCursor,
    Counts,
    EventRecord,
    ForecastRecord,
    JobRecord,
    NodeNameTaken,
    NodeRecord,
    Page,
    Point,
    ProcessRecord,
    ReadingRecord,
    Stored,
    UnknownMetric,
    Unstorable,
)
from tests.storage.made import LARGEST, MAP, OOM, UUID, batch, chunk, process, reading, ref

EMPTY = Counts(nodes=0, devices=0, jobs=0, processes=0, samples=0, block_maps=0, events=0, alerts=0)
fresh = count(1)
on_the_same_storage = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def whole_batch(sequence: int = 1, **more):
    """One of everything."""
    return batch(sequence, chunk(1, 2), block_maps=((ref(), MAP),), events=(OOM,), readings=(reading(),), **more)


def pages(ask, limit):
    """All items of a list, read page by page."""
    items, cursor = [], None
    while True:
        page = ask(cursor=cursor, limit=limit)
        assert len(page.items) <= limit
        items += page.items
        cursor = page.next_cursor
        if cursor is None:
            return items


class TestExactlyOnce:
    def test_the_same_batch_twice(self, repository):
        assert repository.store([whole_batch()]) == Stored(samples=2, block_maps=1, events=1, duplicates=0)
        assert repository.store([whole_batch()]) == Stored(samples=0, block_maps=0, events=0, duplicates=4)
        assert repository.counts() == replace(EMPTY, devices=1, jobs=1, processes=1, samples=2, block_maps=1, events=1)

    def test_the_same_batch_twice_in_one_call(self, repository):
        assert repository.store([whole_batch(), whole_batch()]) == Stored(
            samples=2, block_maps=1, events=1, duplicates=4
        )

    def test_batches_that_overlap(self, repository):
        repository.store([batch(1, chunk(1, 2, 3))])
        assert repository.store([batch(2, chunk(2, 3, 4))]) == Stored(samples=1, block_maps=0, events=0, duplicates=2)
        assert [c.sequence for c in repository.samples(ref())] == [(1, 2, 3, 4)]

    def test_the_first_one_stays(self, repository):
        repository.store([batch(1, chunk(1, allocated_bytes=(10,)))])
        repository.store([batch(2, chunk(1, allocated_bytes=(99,)))])
        assert repository.samples(ref()) == (chunk(1, allocated_bytes=(10,)),)

    def test_a_number_is_a_process_and_devices_own(self, repository):
        one, other_process, other_device = chunk(1), chunk(1, process_id="p2"), chunk(1, uuid="GPU-other")
        stored = repository.store([batch(1, one, other_process, other_device)])
        assert stored == Stored(samples=3, block_maps=0, events=0, duplicates=0)

    def test_a_restarted_daemon_sends_from_what_was_acknowledged(self, backend):
        before, after = backend.open(), backend.open()
        before.store([batch(1, chunk(1, 2)), batch(2, chunk(3))])
        after.store([batch(2, chunk(3)), batch(3, chunk(4, 5))])
        before.store([batch(3, chunk(4, 5)), batch(4, chunk(6))])
        assert [c.sequence for c in after.samples(ref())] == [(1, 2, 3, 4, 5, 6)]
        assert after.acknowledged("n1", "d1") == 4

    @on_the_same_storage
    @given(cuts=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=8), min_size=1, max_size=6))
    def test_however_it_is_cut(self, repository, cuts):
        process_id = f"cut{next(fresh)}"
        batches = [batch(1, *chunks(ref(process_id), [Sample(n, n * 10, n) for n in sorted(set(cut))])) for cut in cuts]
        stored = repository.store(batches)
        everything = sorted({n for cut in cuts for n in cut})
        assert stored.samples == len(everything)
        assert stored.duplicates == sum(len(set(cut)) for cut in cuts) - len(everything)
        (kept,) = repository.samples(ref(process_id))
        assert list(kept.sequence) == list(kept.columns["allocated_bytes"]) == everything


class TestWholeOrNotAtAll:
    @pytest.mark.parametrize(
        "bad",
        [
            pytest.param(chunk(1, 2, allocated_bytes=(1, LARGEST + 1)), id="a figure that is too large"),
            pytest.param(chunk(1, 2, allocated_bytes=(1,)), id="ragged columns"),
            pytest.param(chunk(1, shoe_size=(43,)), id="a column that there is not"),
            pytest.param(chunk(1, process_id="lone surrogate \ud800"), id="text that is no text"),
        ],
    )
    def test_a_call_that_fails_leaves_nothing(self, repository, bad):
        with pytest.raises(Unstorable, match="nothing of the call was stored"):
            repository.store([whole_batch(1), batch(2, bad)])
        assert repository.counts() == EMPTY
        assert repository.acknowledged("n1", "d1") == 0
        assert repository.store([whole_batch(1)]).samples == 2, "and it can be stored without the bad one"
        assert repository.allocators().items == (ref(),)

    def test_what_was_stored_is_there_for_whoever_opens_it_next(self, backend):
        repository = backend.open()
        repository.store([whole_batch()])
        repository.close()
        assert backend.open().counts().samples == 2


class TestAsItCame:
    def test_unknown_stays_unknown_and_zero_stays_zero(self, repository):
        known = {"allocated_bytes": (0, 0), "num_ooms": (0, LARGEST)}
        repository.store([batch(1, chunk(1, 2, **known))])
        assert repository.samples(ref()) == (chunk(1, 2, **known),)

    def test_one_chunk_for_each_run_that_knows_the_same(self, repository):
        came = (
            chunk(1, 2, allocated_bytes=(1, 2)),
            chunk(3, active_bytes=(3,)),
            chunk(4, allocated_bytes=(4,)),
            chunk(5),
        )
        came = (*came[:3], replace(came[3], columns={}))
        repository.store([batch(1, *came)])
        assert repository.samples(ref()) == came

    @on_the_same_storage
    @given(
        samples=st.lists(
            st.builds(lambda known: known, st.dictionaries(st.sampled_from(COLUMNS), st.integers(0, LARGEST))),
            max_size=8,
        )
    )
    def test_samples_of_any_figures(self, repository, samples):
        mine = ref(f"any{next(fresh)}")
        came = tuple(chunks(mine, [Sample(i + 1, i, **known) for i, known in enumerate(samples)]))
        repository.store([batch(1, *came)])
        assert repository.samples(mine) == came

    def test_block_maps(self, repository):
        bare = BlockMap(sequence=9, time_us=90, groups=())
        repository.store([batch(1, block_maps=((ref(), MAP), (ref(), bare)))])
        assert repository.block_maps(ref()) == (MAP, bare)
        assert repository.latest_block_map(ref()) == bare
        assert repository.latest_block_map(ref("nobody")) is None

    def test_block_maps_whose_sum_is_beyond_what_can_be_kept(self, repository):
        group = replace(MAP.groups[0], reserved_bytes=LARGEST)
        enormous = replace(MAP, groups=(group, group))
        repository.store([batch(1, block_maps=((ref(), enormous),))])
        assert repository.latest_block_map(ref()) == enormous

    def test_events(self, repository):
        stopped = Event("p1", 9, LARGEST, EventKind.STOPPED)
        dropped = Event("p1", 10, 100, EventKind.DROPPED, dropped_count=0)
        repository.store([batch(1, events=(OOM, stopped, dropped))])
        assert [r.event for r in repository.events().items] == [dropped, stopped, OOM]

    def test_processes(self, repository):
        devices = (Device(UUID, 0, "NVIDIA H200", 100, 50), Device("MIG-1", 1))
        known = process(
            rank=0,
            world_size=8,
            local_rank=0,
            torch_version="2.9.1",
            allocator_conf="",
            program="train.py",
            devices=devices,
        )
        bare = process("p2", "été/日本 🚀 'quoted\" %s ?")
        repository.store([batch(1, processes=(known, bare))])
        assert repository.process("p1") == ProcessRecord(known, "n1", 5_000, 5_000, None)
        assert repository.process("p2") == ProcessRecord(bare, "n1", 5_000, 5_000, None)
        assert repository.process("p3") is None

    def test_readings(self, repository):
        bare = reading(uuid="GPU-2", from_nvml=False, free_bytes=None, processes=(), bill=None, problem="NVML hangs")
        repository.store([batch(1, readings=(reading(), bare))])
        assert repository.devices().items == (ReadingRecord("n1", reading(), 5_000), ReadingRecord("n1", bare, 5_000))
        assert repository.device("GPU-2").device == Device("GPU-2", 3, "NVIDIA H200", 100)
        assert repository.device("GPU-3") is None

    def test_what_nobody_described_is_kept_and_appears_once_somebody_does(self, repository):
        repository.store([batch(1, chunk(1), processes=())])
        assert repository.counts() == replace(EMPTY, samples=1)
        assert repository.jobs().items == repository.allocators().items == ()
        repository.store([batch(2, processes=(process(),))])
        assert repository.allocators().items == (ref(),)
        assert repository.samples(ref()) == (chunk(1),)


class TestAcknowledgement:
    def test_is_the_highest_number_that_was_stored(self, repository):
        assert repository.acknowledged("n1", "d1") == 0
        repository.store([batch(3), batch(4)])
        repository.store([batch(2)])
        assert repository.acknowledged("n1", "d1") == 4

    def test_is_of_one_daemon_on_one_node(self, repository):
        repository.store([batch(3), batch(8, daemon_id="d2"), batch(9, node="n2")])
        asked = [("n1", "d1"), ("n1", "d2"), ("n2", "d1"), ("n2", "d2")]
        assert [repository.acknowledged(*daemon) for daemon in asked] == [3, 8, 9, 0]

    def test_of_a_number_as_large_as_can_be(self, repository):
        repository.store([batch(LARGEST)])
        assert repository.acknowledged("n1", "d1") == LARGEST


class TestNodes:
    def hello(self, repository, node, daemon_id, at_us, silent_before_us=0, **more):
        given = {"version": "1", "metrics_address": None, **more}
        repository.register_node(node, daemon_id, received_us=at_us, silent_before_us=silent_before_us, **given)

    def test_are_listed_by_name_as_they_last_introduced_themselves(self, repository):
        self.hello(repository, "b", "d1", 10)
        self.hello(repository, "a", "d2", 20, metrics_address="a:9400")
        self.hello(repository, "b", "d1", 30, version="2")
        assert repository.nodes() == Page(
            (NodeRecord("a", "d2", "1", "a:9400", 20, 20), NodeRecord("b", "d1", "2", None, 10, 30)), None
        )

    def test_are_heard_by_their_batches_too(self, repository):
        self.hello(repository, "n1", "d1", 10)
        repository.store([batch(1, received_us=40), batch(1, daemon_id="somebody else", received_us=90)])
        assert repository.nodes().items[0].last_received_us == 40

    def test_a_name_is_kept_while_its_daemon_is_heard(self, repository):
        self.hello(repository, "n1", "d1", 10)
        repository.store([batch(1, received_us=40)])
        with pytest.raises(NodeNameTaken, match="node 'n1' is reported by daemon d1") as raised:
            self.hello(repository, "n1", "d2", 50, silent_before_us=40)
        assert (raised.value.holder, raised.value.asker, raised.value.last_received_us) == ("d1", "d2", 40)
        self.hello(repository, "n1", "d2", 50, silent_before_us=41)
        assert repository.nodes().items == (NodeRecord("n1", "d2", "1", None, 10, 50),)


class TestWhoIsWho:
    def test_a_job_is_all_processes_of_its_name(self, repository):
        repository.store(
            [
                batch(1, processes=(process("p1"), process("p2")), received_us=10),
                batch(1, processes=(process("p3"), process("p4", "other")), node="n2", daemon_id="d2", received_us=20),
            ]
        )
        train = JobRecord("train", process_count=3, nodes=("n1", "n2"), first_received_us=10, last_received_us=20)
        other = JobRecord("other", process_count=1, nodes=("n2",), first_received_us=20, last_received_us=20)
        assert repository.jobs().items == (other, train)
        assert repository.job("train") == train
        assert repository.job("nothing") is None
        assert [r.process.process_id for r in repository.processes(job="train").items] == ["p3", "p2", "p1"]
        assert [r.process.process_id for r in repository.processes(node="n2").items] == ["p4", "p3"]

    def test_a_process_is_as_it_last_described_itself(self, backend):
        first, second = backend.open(), backend.open()
        before, after = process(), process(devices=(Device(UUID, 0),))
        first.store([batch(1, processes=(before,), received_us=10)])
        second.store([batch(2, processes=(after,), received_us=20)])
        first.store([batch(1, processes=(before,), received_us=30)])  # sent again
        assert first.process("p1") == ProcessRecord(after, "n1", 10, 20, None)
        first.store([batch(3, processes=(after,), received_us=40)])
        first.store([batch(4, processes=(after,), received_us=50)])
        assert second.process("p1") == ProcessRecord(after, "n1", 10, 50, None)

    def test_a_process_that_changed_its_jobs_name_is_of_the_new_one_only(self, repository):
        repository.store([batch(1, processes=(process(job="old"),))])
        repository.store([batch(2, processes=(process(job="new"),))])
        assert [r.job for r in repository.jobs().items] == ["new"]
        assert repository.job("old") is None

    def test_a_process_stopped_when_it_said_so(self, repository):
        later = Event("p1", 10, 99, EventKind.DROPPED, dropped_count=1)
        repository.store([batch(1, chunk(1), events=(OOM, Event("p1", 9, 95, EventKind.STOPPED), later))])
        assert repository.process("p1").stopped_us == 95

    def test_allocators_are_found_by_job_process_and_when_they_were_heard(self, repository):
        repository.store([batch(1, chunk(1), processes=(process(),), received_us=10)])
        repository.store([batch(2, chunk(1, process_id="p2", uuid="GPU-2"), chunk(1, process_id="p2"), received_us=20)])
        repository.store([batch(3, chunk(1, process_id="p3"), processes=(process("p3", "other"),), received_us=20)])
        both = {ref("p2"), ref("p2", "GPU-2")}
        assert set(repository.allocators(process_id="p2").items) == both
        assert set(repository.allocators(job="train").items) == both | {ref("p1")}
        assert set(repository.allocators(received_since_us=11).items) == both | {ref("p3")}

    def test_a_devices_reading_is_the_latest_batchs_though_its_clock_went_back(self, repository):
        repository.store(
            [batch(1, readings=(reading(90),), received_us=10), batch(2, readings=(reading(50),), received_us=20)]
        )
        repository.store([batch(1, readings=(reading(90),), received_us=30)])  # sent again
        assert repository.device(UUID) == ReadingRecord("n1", reading(50), 20)

    def test_a_device_that_moved_is_its_new_nodes(self, repository):
        repository.store([batch(7, readings=(reading(90),))])
        repository.store([batch(1, readings=(reading(91),), node="n2", daemon_id="d2")])
        assert repository.devices(node="n1").items == ()
        assert repository.devices(node="n2").items[0].reading == reading(91)


class TestMeasured:
    def test_samples_come_by_number_and_window(self, repository):
        repository.store([batch(1, chunk(5, 6)), batch(2, chunk(2, 3))])
        assert repository.samples(ref()) == (chunk(2, 3, 5, 6),)
        assert repository.samples(ref(), from_us=30, to_us=60) == (chunk(3, 5),)
        assert repository.samples(ref(), after_sequence=2, limit=2) == (chunk(3, 5),)
        assert repository.samples(ref(), from_us=61) == repository.samples(ref("nobody")) == ()

    def test_a_window_is_by_the_samples_clock_wherever_it_jumped(self, repository):
        repository.store([batch(1, chunk(1, 2, 3, 4, times=(100, 200, 50, 150)))])
        assert [c.sequence for c in repository.samples(ref(), from_us=100, to_us=200)] == [(1, 4)]
        assert [c.time_us for c in repository.samples(ref())] == [(100, 200, 50, 150)]

    def test_block_maps_come_likewise(self, repository):
        maps = [replace(MAP, sequence=n, time_us=n * 10) for n in (1, 2, 3)]
        repository.store([batch(1, block_maps=tuple((ref(), m) for m in reversed(maps)))])
        assert repository.block_maps(ref()) == tuple(maps)
        assert repository.block_maps(ref(), from_us=20, to_us=30) == (maps[1],)
        assert repository.block_maps(ref(), after_sequence=1, limit=1) == (maps[1],)
        assert repository.latest_block_map(ref()) == maps[2]

    def test_a_series_has_a_point_for_each_bucket_that_knows_something(self, repository):
        times = (1_000, 1_999, 2_000, 2_500, 2_999, 4_000)
        known = chunk(
            1, 2, 3, 4, 5, 6, times=times, allocated_bytes=(5, 8, 0, 7, 2, LARGEST), num_ooms=(0, 0, 0, 0, 0, 1)
        )
        unknown = chunk(7, 8, times=(2_100, 5_000), active_bytes=(1, 1))
        repository.store([batch(1, known, unknown)])
        points = repository.series(ref(), "allocated_bytes", from_us=1_000, to_us=6_000, step_us=1_000)
        assert points == (
            Point(time_us=1_000, count=2, minimum=5, maximum=8, mean=6.5, last=8),
            Point(time_us=2_000, count=3, minimum=0, maximum=7, mean=3.0, last=2),
            Point(time_us=4_000, count=1, minimum=LARGEST, maximum=LARGEST, mean=float(LARGEST), last=LARGEST),
        )

    def test_a_series_ends_before_to_us_and_its_buckets_are_multiples_of_the_step(self, repository):
        repository.store([batch(1, chunk(1, 2, 3, times=(1_400, 1_600, 1_700)))])
        points = repository.series(ref(), "allocated_bytes", from_us=1_500, to_us=1_700, step_us=1_000)
        assert points == (Point(time_us=1_000, count=1, minimum=200, maximum=200, mean=200.0, last=200),)

    def test_a_series_last_value_is_of_the_highest_number_though_the_clock_went_back(self, repository):
        repository.store([batch(1, chunk(1, 2, times=(1_900, 1_100), allocated_bytes=(1, 2)))])
        (point,) = repository.series(ref(), "allocated_bytes", from_us=0, to_us=9_000, step_us=1_000)
        assert point.last == 2

    def test_a_series_of_a_line_of_the_bill(self, repository):
        repository.store([batch(1, readings=(reading(90, free=40), reading(91, free=30), reading(100, free=0)))])
        window = {"from_us": 0, "to_us": 1_000, "step_us": 10}
        assert repository.series(ref(), Line.STRANDED, **window) == (
            Point(time_us=90, count=2, minimum=10, maximum=20, mean=15.0, last=20),
            Point(time_us=100, count=1, minimum=50, maximum=50, mean=50.0, last=50),
        )
        own = AllocatorRef("", UUID)
        assert [p.last for p in repository.series(own, Line.FREE, **window)] == [30, 0]
        assert [p.last for p in repository.series(own, Line.DRIVER, **window)] == [0, 0]
        assert repository.series(ref(), Line.OUTSIDE, **window) == repository.series(own, Line.STRANDED, **window) == ()

    def test_a_series_that_there_is_not_names_those_that_there_are(self, repository):
        with pytest.raises(UnknownMetric, match="no series 'shoe_size'; there are allocated_bytes, active_bytes"):
            repository.series(ref("nobody"), "shoe_size", from_us=0, to_us=1, step_us=1)

    def test_events_are_found_by_job_process_and_kind(self, repository):
        of_other = Event("p2", 1, 10, EventKind.STOPPED)
        stopped = Event("p1", 9, 95, EventKind.STOPPED)
        repository.store([batch(1, processes=(process(), process("p2", "other")), events=(OOM, of_other, stopped))])
        assert repository.events(job="train").items == (EventRecord(stopped, 5_000), EventRecord(OOM, 5_000))
        assert [r.event for r in repository.events(process_id="p2").items] == [of_other]
        assert [r.event for r in repository.events(kind=EventKind.STOPPED).items] == [stopped, of_other]
        assert repository.events(job="other", kind=EventKind.OOM).items == ()


class TestJudged:
    OK = Forecast(10, State.OK, summary="room enough")
    RISK = Forecast(20, State.AT_RISK, Cause.LEAK, 1, LARGEST, -0.25, 1.5, "11 GiB an hour")

    def test_a_forecast_replaces_the_one_before(self, repository):
        repository.save_forecasts([(ref(), self.OK)], made_us=1)
        repository.save_forecasts([(ref(), self.RISK), (ref("p2"), self.OK)], made_us=2)
        assert repository.forecasts().items == (
            ForecastRecord(ref("p2"), self.OK, 2),
            ForecastRecord(ref(), self.RISK, 2),
        )

    def test_every_change_of_state_or_cause_is_kept(self, repository):
        other_cause = replace(self.RISK, time_us=40, cause=Cause.GROWTH)
        repository.save_forecasts([(ref(), self.OK)], made_us=1)
        repository.save_forecasts([(ref(), replace(self.OK, time_us=15)), (ref("p2"), self.OK)], made_us=2)
        repository.save_forecasts([(ref(), self.RISK), (ref(), replace(self.RISK, time_us=30))], made_us=3)
        repository.save_forecasts([(ref(), other_cause)], made_us=4)
        assert repository.forecast_changes(ref()).items == (
            ForecastRecord(ref(), other_cause, 4),
            ForecastRecord(ref(), self.RISK, 3),
            ForecastRecord(ref(), self.OK, 1),
        )

    def test_forecasts_are_found_by_job_allocator_and_state(self, repository):
        repository.store([batch(1, processes=(process(), process("p2", "other")))])
        repository.save_forecasts([(ref(), self.RISK), (ref("p2"), self.OK)], made_us=1)
        risk, calm = ForecastRecord(ref(), self.RISK, 1), ForecastRecord(ref("p2"), self.OK, 1)
        assert repository.forecasts(job="train").items == (risk,)
        assert repository.forecasts(allocator=ref("p2")).items == (calm,)
        assert repository.forecasts(at_least=State.WATCH).items == (risk,)
        assert repository.forecasts(at_least=State.CRITICAL).items == ()

    def test_an_alert_is_the_latest_that_was_saved_of_its_id(self, repository):
        firing = AlertRecord(
            "a1",
            "AllocscopeMemoryLeak",
            "critical",
            "firing",
            10,
            20,
            Cause.LEAK,
            "train",
            None,
            {"rank": "0"},
            "sum",
            "desc",
            "advice",
        )
        resolved = replace(firing, state="resolved", updated_us=30, resolved_us=25)
        silent = AlertRecord("a2", "AllocscopeNodeSilent", "warning", "pending", 11, 11)
        repository.save_alerts([firing, silent])
        assert repository.alerts().items == (silent, firing)
        repository.save_alerts([resolved])
        repository.save_alerts([firing])  # somebody else, late
        assert repository.alerts().items == (silent, resolved)
        assert repository.alerts(standing=True).items == repository.alerts(state="pending").items == (silent,)
        assert repository.alerts(standing=False).items == repository.alerts(job="train").items == (resolved,)

    def test_saving_nothing_is_fine(self, repository):
        repository.save_forecasts([], made_us=1)
        repository.save_alerts([])
        assert repository.store([]) == Stored(0, 0, 0, 0)
        assert repository.counts() == EMPTY


LISTS = ["nodes", "devices", "jobs", "processes", "allocators", "events", "forecasts", "forecast_changes", "alerts"]


def add(repository, number: int) -> None:
    """One more of everything that is listed."""
    name = f"x{number:02d}"
    happened = Event(name, 1, number, EventKind.DROPPED)
    repository.register_node(name, "d", version="1", metrics_address=None, received_us=number, silent_before_us=0)
    repository.store(
        [
            batch(
                number,
                chunk(1, process_id=name),
                processes=(process(name, f"job {name}"),),
                events=(happened,),
                readings=(reading(uuid=name),),
            )
        ]
    )
    state = State.OK if number % 2 else State.WATCH
    repository.save_forecasts(
        [(ref(name), Forecast(number, State.OK)), (ref("all"), Forecast(number, state))], made_us=1
    )
    repository.save_alerts([AlertRecord(name, "n", "info", "firing", number, number)])


class TestPages:
    @pytest.mark.parametrize("listed", LISTS)
    def test_hold_each_item_once_in_one_order(self, repository, listed):
        for number in range(7):
            add(repository, number)
        ask = getattr(repository, listed)
        if listed == "forecast_changes":
            ask = lambda **more: repository.forecast_changes(ref("all"), **more)  # noqa: E731
        everything = ask(limit=100)
        assert everything.next_cursor is None
        assert len(everything.items) == (8 if listed == "forecasts" else 7)
        for limit in (1, 2, 3, 7, 8):
            assert pages(ask, limit) == list(everything.items)

    @pytest.mark.parametrize("listed", LISTS)
    def test_do_not_repeat_or_hide_what_was_there_when_more_comes(self, repository, listed):
        for number in range(6):
            add(repository, number)
        ask = getattr(repository, listed)
        if listed == "forecast_changes":
            ask = lambda **more: repository.forecast_changes(ref("all"), **more)  # noqa: E731
        before = ask(limit=100).items
        first = ask(limit=2)
        for number in (90, 91, 92):
            add(repository, number)
        rest = pages(lambda cursor, limit: ask(cursor=cursor or first.next_cursor, limit=limit), 2)
        seen = [self.key(listed, item) for item in (*first.items, *rest)]
        assert len(seen) == len(set(seen))
        assert [key for key in seen if key in {self.key(listed, item) for item in before}] == [
            self.key(listed, item) for item in before
        ]

    def key(self, listed, item):
        """What of an item does not change."""
        match listed:
            case "nodes":
                return item.node
            case "devices":
                return item.device.uuid
            case "jobs":
                return item.job
            case "processes":
                return item.process.process_id
            case "allocators":
                return item
            case "events":
                return item.event
            case "forecasts":
                return item.allocator
            case "forecast_changes":
                return item.forecast
            case _:
                return item.alert_id

    @pytest.mark.parametrize(
        "cursor",
        [
            "",
            "?",
            "abc",
            "WyJub2RlcyIsICJhIl0",
            "WyJqb2JzIiwgLTFd",
            "WyJqb2JzIiwgOTIyMzM3MjAzNjg1NDc3NTgwOF0",
            "💥",
            "[" * 5000,
        ],
    )
    def test_a_cursor_of_somebody_elses_making_is_refused(self, repository, cursor):
        with pytest.raises(BadCursor, match="next_cursor"):
            repository.jobs(cursor=cursor)


class TestSeveralAtOnce:
    def test_writers_of_overlapping_batches_keep_each_thing_once(self, backend):
        """Four collectors' threads over two openings, each sending most of what the others send."""
        repositories = [backend.open(), backend.open()]
        ready = threading.Barrier(4)

        def send(writer: int) -> int:
            ready.wait(timeout=30)
            mine = repositories[writer % 2]
            return sum(
                mine.store(
                    [batch(k + 1, chunk(*range(k * 10 + 1, k * 10 + 21), process_id="shared"), daemon_id=f"d{writer}")]
                ).samples
                for k in range(25)
            )

        with ThreadPoolExecutor(4) as pool:
            new = sum(pool.map(send, range(4)))
        (kept,) = repositories[0].samples(ref("shared"))
        assert kept.sequence == tuple(range(1, 261))
        assert new == 260, "each sample was new to exactly one of them"
        assert [repositories[1].acknowledged("n1", f"d{writer}") for writer in range(4)] == [25] * 4

    def test_a_reader_sees_whole_batches_while_they_are_written(self, backend):
        writer, reader = backend.open(), backend.open()
        done = threading.Event()

        def write() -> None:
            try:
                for k in range(60):
                    writer.store([batch(k + 1, *(chunk(k + 1, process_id=f"p{n}") for n in range(8)))])
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            counts = []
            while not done.is_set():
                counts.append(reader.counts().samples)
            writing.result()
        counts.append(reader.counts().samples)
        assert all(n % 8 == 0 for n in counts)
        assert counts == sorted(counts)
        assert counts[-1] == 480


class TestPrune:
    def test_takes_away_what_was_received_before_and_nothing_else(self, repository):
        repository.store([whole_batch(1, received_us=10)])
        late = replace(MAP, sequence=17)
        repository.store(
            [batch(2, chunk(11, 12), block_maps=((ref(), late),), readings=(reading(95),), received_us=20)],
        )
        pruned = repository.prune(before_us=20)
        assert (pruned.samples, pruned.block_maps, pruned.bills) == (2, 1, 2)
        assert repository.samples(ref()) == (chunk(11, 12),)
        assert repository.block_maps(ref()) == (late,)
        assert [r.event for r in repository.events().items] == [OOM]
        assert repository.device(UUID).reading == reading(95)
        assert repository.acknowledged("n1", "d1") == 2
        again = repository.prune(before_us=20)
        assert (again.samples, again.block_maps, again.bills) == (0, 0, 0)

    def test_takes_away_more_than_one_transaction_does(self, repository, monkeypatch):
        monkeypatch.setattr("allocscope.storage.sql.PRUNED_AT_ONCE", 3)
        repository.store([batch(1, chunk(*range(1, 12)))])
        assert repository.prune(before_us=9_999).samples == 11
        assert repository.counts().samples == 0


def test_closing_twice_is_fine(backend):
    repository = backend.open()
    repository.close()
    repository.close()
