"""The shipped rules in promtool: what fires, when, for whom, and what does not. Scraped and judged every ten seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alerts.promtool import CAUSES, Firing, assert_fires, assert_holds, assert_says, spans

LEAK = "AllocscopeMemoryLeak"
GROWTH = "AllocscopeMemoryGrowth"
CAPACITY = "AllocscopeCapacityOOMRisk"
FRAGMENTATION = "AllocscopeFragmentationOOMRisk"
THRASHING = "AllocscopeAllocatorThrashing"
OOM = "AllocscopeOOM"
SILENT = "AllocscopeNodeSilent"
DROPPING = "AllocscopeDroppingData"

MINUTE = 60
HOUR = 3600
GIB = 1 << 30

Span = tuple[float | str | None, int]


def allocator(rank: int = 0, job: str = "llama", node: str = "n1", **more: str) -> str:
    labels = {"node": node, "gpu": str(rank % 8), "uuid": f"GPU-{rank}", "job": job, "rank": str(rank), **more}
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def forecast(*states: Span, cause: str = "leak", rank: int = 0, **more: str) -> dict[str, str]:
    """An allocator's state over time; its cause is there where it is not well."""
    who = allocator(rank, **more)
    named: list[Span] = [
        ("stale" if state == 0 else state if state in (None, "stale") else 1, s) for state, s in states
    ]
    return {
        f"allocscope_forecast_state{{{who}}}": spans(*states),
        f'allocscope_forecast_cause{{{who},cause="{cause}"}}': spans(*named),
    }


def risks(name: str, *severities: str, job: str = "llama") -> list[Firing]:
    return [(name, severity, job) for severity in severities or ("critical", "warning", "info")]


# what is foreseen


@pytest.mark.parametrize("name", sorted(CAUSES))
def test_a_risk_fires_at_each_severity_once_it_has_held_for_so_long(tmp_path: Path, name: str):
    assert_fires(
        tmp_path,
        forecast((0, MINUTE), (3, HOUR), cause=CAUSES[name]),
        {
            "60s": [],
            "70s": risks(name, "critical"),
            "80s": risks(name, "critical"),
            "90s": risks(name, "critical", "warning"),
            "110s": risks(name, "critical", "warning"),
            "120s": risks(name, "critical", "warning", "info"),
            "10m": risks(name, "critical", "warning", "info"),
        },
    )


@pytest.mark.parametrize(
    ("state", "firing"),
    [
        (0, []),
        (1, risks(LEAK, "info")),
        (2, risks(LEAK, "warning", "info")),
        (3, risks(LEAK, "critical", "warning", "info")),
    ],
)
def test_a_state_fires_at_its_severity_and_those_below(tmp_path: Path, state: int, firing: list[Firing]):
    assert_fires(tmp_path, forecast((state, HOUR)), {"10m": firing})


def test_nothing_fires_of_a_healthy_job_however_full_its_device_is(tmp_path: Path):
    who = allocator()
    series = {
        f"allocscope_forecast_state{{{who}}}": spans((0, HOUR)),
        f"allocscope_forecast_margin_ratio{{{who}}}": spans((0.001, HOUR)),
        f"allocscope_headroom_bytes{{{who}}}": spans((1000, HOUR)),
        f"allocscope_reserved_bytes{{{who}}}": spans((79 * GIB, HOUR)),
        f"allocscope_alloc_retries_total{{{who}}}": spans((7, HOUR)),
        f"allocscope_ooms_total{{{who}}}": spans((2, HOUR)),
        'allocscope_node_last_seen_timestamp_seconds{node="n1"}': spans(("+10", HOUR)),
        'allocscope_dropped_total{node="n1",what="samples",reason="spool_full"}': spans((12, HOUR)),
    }
    assert_fires(tmp_path, series, {"1m": [], "6m": [], "16m": [], "45m": []})


def test_odd_moments_wake_nobody(tmp_path: Path):
    assert_fires(
        tmp_path,
        forecast(*[(3, 10), (0, 20)] * 60),
        {f"{minute}m": [] for minute in range(1, 30)},
    )


def test_what_is_over_resolves_after_its_time(tmp_path: Path):
    assert_fires(
        tmp_path,
        forecast((3, 600), (0, HOUR)),
        {
            "590s": risks(LEAK),
            "650s": risks(LEAK),
            "660s": risks(LEAK, "warning", "info"),
            "710s": risks(LEAK, "warning", "info"),
            "720s": risks(LEAK, "info"),
            "890s": risks(LEAK, "info"),
            "900s": [],
        },
    )


def test_a_job_that_ended_takes_what_was_foreseen_of_it_with_it(tmp_path: Path):
    assert_fires(
        tmp_path,
        forecast((3, 600), ("stale", HOUR)),
        {"590s": risks(LEAK), "660s": risks(LEAK, "warning", "info"), "900s": []},
    )


def test_a_collector_that_restarts_neither_ends_an_alert_nor_begins_it_anew(tmp_path: Path):
    assert_fires(
        tmp_path,
        forecast((3, 300), ("stale", 40), (3, HOUR)),
        {f"{at}s": risks(LEAK) for at in range(120, 600, 10)},
    )


def test_samples_that_are_missing_for_a_while_change_nothing(tmp_path: Path):
    assert_fires(
        tmp_path,
        forecast((3, 300), (None, 200), (3, HOUR)),
        {f"{at}s": risks(LEAK) for at in range(120, 800, 10)},
    )


def test_a_collector_that_stays_away_leaves_no_alert_for_ever(tmp_path: Path):
    assert_fires(
        tmp_path, forecast((3, 300), (None, HOUR)), {"590s": risks(LEAK), "12m": risks(LEAK, "info"), "15m": []}
    )


def test_sixty_four_ranks_at_risk_are_one_alert(tmp_path: Path):
    series: dict[str, str] = {}
    for rank in range(64):
        series |= forecast((3, 400), rank=rank, node=f"n{rank // 8}")
    assert_fires(tmp_path, series, {"5m": risks(LEAK)})


def test_a_jobs_alert_fires_until_the_last_of_its_ranks_is_well(tmp_path: Path):
    series = forecast((3, 300), (0, HOUR)) | forecast((0, 280), (3, 320), (0, HOUR), rank=1, node="n2")
    moments = {f"{at}s": risks(LEAK) for at in range(120, 660, 10)}
    assert_fires(tmp_path, series, moments | {"660s": risks(LEAK, "warning", "info"), "20m": []})


def test_two_jobs_on_two_nodes_are_two_alerts(tmp_path: Path):
    series = forecast((3, HOUR)) | forecast((2, HOUR), cause="fragmentation", job="bert", node="n2")
    assert_fires(tmp_path, series, {"5m": [*risks(LEAK), *risks(FRAGMENTATION, "warning", "info", job="bert")]})


def test_a_cause_that_changes_leaves_no_moment_without_an_alert(tmp_path: Path):
    who = allocator()
    series = {
        f"allocscope_forecast_state{{{who}}}": spans((3, HOUR)),
        f'allocscope_forecast_cause{{{who},cause="growth"}}': spans((1, 300), ("stale", HOUR)),
        f'allocscope_forecast_cause{{{who},cause="leak"}}': spans((None, 300), (1, HOUR)),
    }
    assert_fires(
        tmp_path,
        series,
        {
            "300s": risks(GROWTH),
            "310s": [*risks(GROWTH), *risks(LEAK, "critical")],
            "330s": [*risks(GROWTH), *risks(LEAK, "critical", "warning")],
            "360s": [*risks(GROWTH, "warning", "info"), *risks(LEAK)],
            "11m": risks(LEAK),
        },
    )


def test_a_state_without_a_cause_is_not_silent(tmp_path: Path):
    assert_fires(tmp_path, {f"allocscope_forecast_state{{{allocator()}}}": spans((3, HOUR))}, {"5m": risks(CAPACITY)})


def test_two_collectors_that_know_one_allocator_are_one_alert(tmp_path: Path):
    """A node that moved from one to the other: the first tells its last forecast for some minutes yet."""
    series = forecast((3, HOUR), instance="c1:9464") | forecast((1, HOUR), instance="c2:9464")
    assert_fires(tmp_path, series, {"5m": risks(LEAK)})


def figured(rank: int, *, state: int = 3, seconds: float | None = None, margin: float | None = None) -> dict[str, str]:
    """A rank that is unwell, with figures of its own."""
    who = allocator(rank, node=f"n{rank}")
    return forecast((state, 900), rank=rank, node=f"n{rank}") | {
        f"allocscope_forecast_seconds_to_oom{{{who}}}": spans((seconds, 900)),
        f"allocscope_forecast_margin_ratio{{{who}}}": spans((margin, 900)),
        f"allocscope_headroom_bytes{{{who}}}": spans(((rank + 1) * GIB / 4, 900)),
        f"allocscope_forecast_request_bytes{{{who}}}": spans(((rank + 1) * GIB, 900)),
    }


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        pytest.param(
            [figured(0, seconds=600), figured(1, seconds=60), figured(2, seconds=61)], 1, id="the least time left"
        ),
        pytest.param([figured(0, margin=-0.5), figured(1, seconds=6000, margin=0.2)], 1, id="a trend before none"),
        pytest.param([figured(0, margin=-0.1), figured(1, margin=-0.2)], 1, id="the least margin"),
        pytest.param([figured(0), figured(1, margin=0.9)], 1, id="a margin before none"),
        pytest.param([figured(0, state=2, seconds=10), figured(1, seconds=99)], 1, id="the gravest state"),
    ],
)
def test_who_goes_first_is_as_the_collector_has_it(tmp_path: Path, ranks: list[dict[str, str]], first: int):
    series = {name: values for rank in ranks for name, values in rank.items()}
    leads = f'allocscope:forecast_first{{job="llama",cause="leak",severity="warning",node="n{first}"}}'
    assert_holds(tmp_path, series, "5m", f"count({leads})", 'count(allocscope:forecast_first{severity="warning"}) == 1')


def test_a_risk_says_who_goes_first_and_with_which_figures(tmp_path: Path):
    series = figured(0, seconds=600) | figured(2, seconds=400) | figured(3, seconds=401)
    assert_says(
        tmp_path,
        series,
        "20s",
        (LEAK, "critical", "llama"),
        {
            "summary": "rank 2 of llama on n2, GPU 2 is about to run out of memory, by a leak: asks for up to 3.00 GiB at once, 768.00 MiB would"
            " fit now; 2 more of the job's ranks with it",
            "description": "Memory that nothing uses again grows step after step. Headroom 768.00 MiB, largest request 3.00 GiB, time left"
            " 7 min. A PyTorch snapshot with history shows who allocated what is never freed: often a kept loss, a list of outputs or a"
            " retained graph.",
            "runbook_url": "docs/runbook/AllocscopeMemoryLeak.md",
            "node": "n2",
            "rank": "2",
            "gpu": "2",
            "uuid": "GPU-2",
        },
    )


@pytest.mark.parametrize("job", ['"', "\\", "{{ .Value }}", "`", "a}b", "naïve 作业", "%q %s"])
def test_whatever_a_job_is_called_it_is_just_a_name(tmp_path: Path, job: str):
    written = job.replace("\\", "\\\\").replace('"', '\\"')
    assert_says(
        tmp_path,
        forecast((3, 900), cause="neighbour", job=written),
        "20s",
        ("AllocscopeNeighbourPressure", "critical", job),
        {
            "summary": f"rank 0 of {job} on n1, GPU 0 is about to run out of memory: another process on the device grows: asks for"
            " up to unknown at once, unknown would fit now",
            "description": "Memory of this device that the job could have had goes to another process. Headroom unknown, largest request"
            f" unknown, time left unknown. `allocscope bill {job}` shows how much, and whose it is where that has a probe; `nvidia-smi`"
            " on the node names the others. Move one of the two.",
            "runbook_url": "docs/runbook/AllocscopeNeighbourPressure.md",
            "node": "n1",
            "rank": "0",
            "gpu": "0",
            "uuid": "GPU-0",
        },
    )


def test_a_process_without_a_rank_is_named_by_its_job_and_device(tmp_path: Path):
    who = 'node="n1",gpu="",uuid="GPU-7",job="serve",rank=""'
    assert_says(
        tmp_path,
        {f"allocscope_forecast_state{{{who}}}": spans((3, 900))},
        "20s",
        (CAPACITY, "critical", "serve"),
        {
            "summary": "serve on n1 is about to run out of memory: it needs more than the device has: asks for up to unknown at once,"
            " unknown would fit now",
            "description": "The job needs more than the device has, holes or not. Headroom unknown, largest request unknown, time left"
            " unknown. A smaller batch, a shorter sequence, sharding or offloading help; allocator settings do not.",
            "runbook_url": "docs/runbook/AllocscopeCapacityOOMRisk.md",
            "node": "n1",
            "rank": "",
            "gpu": "",
            "uuid": "GPU-7",
        },
    )


# what the allocator does


def flushes(*totals: Span, rank: int = 0, **more: str) -> dict[str, str]:
    return {f"allocscope_alloc_retries_total{{{allocator(rank, **more)}}}": spans(*totals)}


THRASHES = [(THRASHING, "warning", "llama")]


@pytest.mark.parametrize(
    ("totals", "moments"),
    [
        pytest.param(
            [(0, 60), ("+1", 50), (5, HOUR)], {"90s": [], "100s": THRASHES}, id="five moments within five minutes"
        ),
        pytest.param([(0, 60), ("+1", 40), (4, HOUR)], {"100s": [], "5m": []}, id="four are not enough"),
        pytest.param([(0, 60), (500, HOUR)], {"70s": [], "5m": []}, id="many at one moment are one"),
        pytest.param([(7, HOUR)], {"10s": [], "10m": []}, id="those of before it was watched"),
        pytest.param([(n, 100) for n in range(20)], {"10m": [], "30m": []}, id="one now and then"),
        pytest.param([(9, 10), (0, 10)] * 20, {"100s": THRASHES, "6m": THRASHES}, id="again and again after resets"),
        pytest.param([(40 - n, 10) for n in range(40)], {"2m": [], "6m": []}, id="resets are none"),
        pytest.param(
            [(0, 60), ("+1", 50), (5, HOUR)], {"5m": THRASHES, "620s": THRASHES, "670s": []}, id="over, after its time"
        ),
        pytest.param([(0, 60), ("+1", 50), ("stale", HOUR)], {"600s": THRASHES, "670s": []}, id="its job has ended"),
        pytest.param([(5, 60), ("stale", 60), (5, HOUR)], {"3m": [], "10m": []}, id="the collector restarted"),
        pytest.param([(5, 60), (None, 200), (9, HOUR)], {"5m": []}, id="samples are missing"),
    ],
)
def test_thrashing_is_flushing_again_and_again(tmp_path: Path, totals: list[Span], moments: dict[str, list[Firing]]):
    assert_fires(tmp_path, flushes(*totals), moments)


def test_ranks_that_flush_once_each_do_not_thrash_together(tmp_path: Path):
    series: dict[str, str] = {}
    for rank in range(8):
        series |= flushes((0, 60 + 10 * rank), (1, HOUR), rank=rank)
    assert_fires(tmp_path, series, {"2m": [], "5m": []})


def test_thrashing_says_who_and_how_often(tmp_path: Path):
    series = flushes((0, 60), ("+1", 60), (6, HOUR)) | flushes(
        (0, 60), ("+2", 70), (14, HOUR), rank=1, instance="d:9466"
    )
    assert_says(
        tmp_path,
        series | flushes((0, 60), ("+2", 70), (14, HOUR), rank=1, instance="c:9464"),
        "3m",
        (THRASHING, "warning", "llama"),
        {
            "summary": "rank 1 of llama on n1, GPU 1 flushes its allocator's cache again and again: 7 times in the last 5 min;"
            " 1 more of the job's ranks with it",
            "description": "Requests found no room, so the allocator gave back all that it had cached and asked the driver anew. Each"
            " time the device waits, and the job slows down; the next request may not fit at all. See `allocscope bill llama`.",
            "runbook_url": "docs/runbook/AllocscopeAllocatorThrashing.md",
            "node": "n1",
            "rank": "1",
            "gpu": "1",
            "uuid": "GPU-1",
        },
    )


# what has happened


def died(*spans_of_time: Span, rank: int = 0) -> dict[str, str]:
    return {f"allocscope_last_oom_timestamp_seconds{{{allocator(rank)}}}": spans(*spans_of_time)}


def counted(*totals: Span, rank: int = 0) -> dict[str, str]:
    return {f"allocscope_ooms_total{{{allocator(rank)}}}": spans(*totals)}


RAN_OUT = [(OOM, "warning", "llama")]


@pytest.mark.parametrize(
    ("series", "moments"),
    [
        pytest.param(
            died((None, 60), (57, 600)), {"50s": [], "60s": RAN_OUT, "650s": RAN_OUT, "660s": []}, id="for ten minutes"
        ),
        pytest.param(
            died((None, 60), (57, 10), ("stale", HOUR)),
            {"60s": RAN_OUT, "650s": RAN_OUT, "660s": []},
            id="though the collector went away after one scrape",
        ),
        pytest.param(
            died((None, 60), (57, 60), ("stale", 60), (57, 300)),
            {"150s": RAN_OUT, "650s": RAN_OUT, "11m": []},
            id="restarted",
        ),
        pytest.param(
            died((None, 60), (57, 300), (355, 600)), {"650s": RAN_OUT, "950s": RAN_OUT, "960s": []}, id="twice, caught"
        ),
        pytest.param(
            counted((0, 60), (1, HOUR)), {"50s": [], "60s": RAN_OUT, "10m": RAN_OUT, "700s": []}, id="counted"
        ),
        pytest.param(counted((3, HOUR)), {"10s": [], "10m": []}, id="those of before it was watched"),
        pytest.param(counted((3, 60), (0, HOUR)), {"60s": [], "10m": []}, id="a counter that was reset"),
        pytest.param(counted((3, 60), ("stale", 60), (3, HOUR)), {"60s": [], "10m": []}, id="the daemon restarted"),
        pytest.param(counted((0, 60), ("stale", HOUR)), {"60s": [], "10m": []}, id="a job that ended well"),
    ],
)
def test_an_oom_is_told_of(tmp_path: Path, series: dict[str, str], moments: dict[str, list[Firing]]):
    assert_fires(tmp_path, series, moments)


def test_an_oom_says_who_was_first(tmp_path: Path):
    series = died((None, 60), (59, 600)) | died((None, 60), (57, 600), rank=1) | died((None, 60), (58, 600), rank=2)
    assert_says(
        tmp_path,
        series | counted((0, 60), (1, 600), rank=2),
        "3m",
        (OOM, "warning", "llama"),
        {
            "summary": "rank 1 of llama on n1, GPU 1 ran out of memory; 2 more of the job's ranks with it",
            "description": "A torch.OutOfMemoryError was raised; the job may have caught it. `allocscope oom` explains the message in the"
            " job's log.",
            "runbook_url": "docs/runbook/AllocscopeOOM.md",
            "node": "n1",
            "rank": "1",
            "gpu": "1",
            "uuid": "GPU-1",
        },
    )


# whether we see


def seen(*times: Span, node: str = "n1", instance: str = "c1:9464") -> dict[str, str]:
    return {f'allocscope_node_last_seen_timestamp_seconds{{node="{node}",instance="{instance}"}}': spans(*times)}


def silent(*nodes: str) -> list[Firing]:
    return [(SILENT, "warning", node) for node in nodes]


@pytest.mark.parametrize(
    ("series", "moments"),
    [
        pytest.param(seen(("+10", HOUR)), {"60s": [], "10m": []}, id="a node that is there"),
        pytest.param(
            seen(("+10", 60), (60, HOUR)),
            {"110s": [], "120s": silent("n1"), "10m": silent("n1")},
            id="one that is gone",
        ),
        pytest.param(
            seen(("+10", 60), (60, 300), (360, 10), ("+10", HOUR)),
            {"350s": silent("n1"), "360s": [], "400s": []},
            id="it is back",
        ),
        pytest.param(
            seen(("+10", 60), (60, 100), ("stale", 20), (60, HOUR)),
            {"150s": silent("n1"), "160s": [], "180s": silent("n1")},
            id="the collector restarted, and knows of it",
        ),
        pytest.param(
            seen(("+10", 60), ("stale", HOUR)),
            {"120s": [], "10m": []},
            id="of whom the collector's end makes nobody know",
        ),
        pytest.param(
            seen(("+10", 60), (60, HOUR)) | seen((None, 60), (70, 10), ("+10", HOUR), instance="c2:9464"),
            {"5m": []},
            id="it reports to another collector now",
        ),
        pytest.param(
            seen(("+10", 60), (60, HOUR)) | seen(("+10", 60), (60, HOUR), node="n2") | seen(("+10", HOUR), node="n3"),
            {"5m": silent("n1", "n2")},
            id="two of three nodes",
        ),
    ],
)
def test_a_node_that_is_silent_is_told_of(tmp_path: Path, series: dict[str, str], moments: dict[str, list[Firing]]):
    assert_fires(tmp_path, series, moments)


def test_a_node_that_was_taken_away_is_forgotten_after_a_day(tmp_path: Path):
    """Seen before the beginning of time, so that the test need not last a day."""
    just_before, just_after = -86400 + 300, -86400 - 300
    series = seen((just_before, HOUR)) | seen((just_after, HOUR), node="n2")
    assert_fires(tmp_path, series, {"290s": silent("n1"), "300s": [], "5m": []})


def test_silence_says_of_whom_and_for_how_long(tmp_path: Path):
    assert_says(
        tmp_path,
        seen(("+10", 60), (60, HOUR)),
        "5m",
        (SILENT, "warning", "n1"),
        {
            "summary": "nothing was heard of node n1 for 4 min",
            "description": "The daemon of the node does not send: it, the node or the way between is down. Its jobs run on, unwatched;"
            " their samples wait in its spool. Look at the daemon's log and /metrics there.",
            "runbook_url": "docs/runbook/AllocscopeNodeSilent.md",
        },
    )


def dropped(*totals: Span, node: str = "n1", what: str = "samples", reason: str = "spool_full") -> dict[str, str]:
    who = f'node="{node}",' if node else ""
    return {f'allocscope_dropped_total{{{who}what="{what}",reason="{reason}"}}': spans(*totals)}


SCRAPED = {'allocscope_build_info{version="1"}': spans((1, 300), ("stale", 20), (1, HOUR))}
"""A target that is there all the time; once it could not be reached."""
LOST = [(DROPPING, "warning", "n1")]


@pytest.mark.parametrize(
    ("series", "moments"),
    [
        pytest.param(
            dropped((3, 600), (4, HOUR)), {"590s": [], "600s": LOST, "890s": LOST, "910s": []}, id="more than before"
        ),
        pytest.param(
            dropped((None, 600), (1, HOUR)),
            {"590s": [], "600s": LOST, "890s": LOST, "910s": []},
            id="the first of its kind",
        ),
        pytest.param(
            dropped((12, 300), ("stale", 20), (12, HOUR)),
            {"10s": [], "6m": [], "10m": []},
            id="of before it was scraped",
        ),
        pytest.param(
            dropped((1, 60), (4, 240), ("stale", 20), (4, HOUR)),
            {"50s": [], "60s": LOST, "350s": LOST, "370s": []},
            id="at once",
        ),
        pytest.param(
            dropped((5, 600), ("stale", 900), (5, HOUR)), {"10m": [], "26m": [], "35m": []}, id="not scraped for long"
        ),
        pytest.param(
            dropped((5, 600), ("stale", 60), (2, HOUR)), {"10m": [], "680s": LOST, "16m": []}, id="lost after a restart"
        ),
        pytest.param(dropped((5, 600), ("stale", HOUR)), {"10m": [], "20m": []}, id="restarted, and nothing is lost"),
        pytest.param(
            dropped((None, 600), (1, 10), ("stale", HOUR)), {"600s": LOST, "700s": LOST, "16m": []}, id="lost, and gone"
        ),
        pytest.param(
            dropped((0, 600), (1, HOUR), what="notifications", reason="closed")
            | dropped((0, 600), (1, HOUR), what="capture", reason="age")
            | dropped((0, 600), (1, HOUR), what="judgements", reason="evaluation_behind"),
            {"11m": []},
            id="what belongs to no series",
        ),
        pytest.param(
            dropped((0, 600), (1, HOUR), node="", reason="evaluation_behind"),
            {"11m": [(DROPPING, "warning", "")]},
            id="by the collector",
        ),
        pytest.param(
            dropped((0, 600), (1, HOUR))
            | dropped((0, 600), (1, HOUR), what="events")
            | dropped((0, 600), (2, HOUR), node="n2"),
            {"11m": [*LOST, (DROPPING, "warning", "n2")]},
            id="by two nodes",
        ),
    ],
)
def test_data_that_is_lost_is_told_of(tmp_path: Path, series: dict[str, str], moments: dict[str, list[Firing]]):
    assert_fires(tmp_path, SCRAPED | series, moments)


def test_dropping_says_what_how_much_and_why(tmp_path: Path):
    series = SCRAPED | dropped((3, 600), (15, HOUR))
    series |= dropped((None, 600), (2, HOUR), what="batches", reason="damaged")
    assert_says(
        tmp_path,
        series,
        "11m",
        (DROPPING, "warning", "n1"),
        {
            "summary": "data is lost on the way from n1: 14 things dropped (2 batches (damaged), 12 samples (spool_full))",
            "description": "A bounded buffer ran over: what came in between is missing from series, and forecasts are blind for that while."
            " Look at allocscope_dropped_total for where, and at whether the next one on the way can be reached.",
            "runbook_url": "docs/runbook/AllocscopeDroppingData.md",
        },
    )
