"""Given the same requests, the simulator does what PyTorch 2.14.1 did: every address, figure, entry and block."""

import json
from itertools import groupby

import pytest

from allocscope.allocator.simulator.replay import case_of, serve, simulator_of
from allocscope.cli.replay import main as replay
from allocscope.cli.replay_case import case_as_json
from tests.simulator.recorded import files, read_case

CASES = [pytest.param(path, id=path.name.removesuffix(".json.gz")) for path in files("truth")]


def any_order_at_once(trace):
    """Frees of several streams that complete at one moment do so in the order of a hash map within PyTorch: any will do."""
    return [
        entry
        for completed, entries in groupby(trace, lambda entry: entry[0] == "free_completed")
        for entry in (sorted(entries) if completed else list(entries))
    ]


def exact(stats, requests):
    """The figures that do not depend on that order."""
    streams = {request[3] for request in requests if request[0] == "a"}
    depends = ("inactive_split",) if len(streams) > 1 else ()
    return {key: figure for key, figure in stats.items() if not key.startswith(depends) or key.endswith("current")}


@pytest.mark.parametrize("path", CASES)
def test_everything_is_as_it_really_was(path):
    told = read_case(path)
    requests, expected = told["requests"], told["expect"]
    case = case_of(told, path.name)
    simulator = simulator_of(case)
    failure = serve(simulator, case.requests)
    found = case_as_json(case, simulator, failure)
    assert found["segments"] == expected["segments"]
    assert exact(simulator.stats(), requests) == exact(expected["stats"], requests)
    assert simulator.stats().keys() == expected["stats"].keys()
    assert any_order_at_once(found["trace"]) == any_order_at_once(expected["trace"])
    assert (failure is None) is (expected["oom"] is None)
    if failure:
        assert (failure.at, failure.message) == (expected["oom"]["at"], expected["oom"]["message"])
        assert failure.requested_bytes == requests[failure.at][2]


@pytest.mark.parametrize("path", CASES)
def test_figures_are_right_on_the_way(path):
    told = read_case(path)
    case = case_of(told, path.name)
    simulator = simulator_of(case, trace=False)
    ids: dict[int, int] = {}
    done = 0
    for until, stats in told["expect"]["marks"]:
        serve_with(simulator, case.requests[done:until], ids)
        found = simulator.stats()
        assert {key: found[key] for key in stats} == stats, f"after {until} requests"
        done = until
    assert done > 0


def serve_with(simulator, requests, ids):
    for kind, *rest in requests:
        if kind == "a":
            ids[rest[0]] = simulator.malloc(rest[1], rest[2])
        elif kind == "f":
            simulator.free(ids.pop(rest[0]))
        elif kind == "r":
            simulator.record_stream(ids[rest[0]], rest[1])
        elif kind == "s":
            simulator.catch_up()
        else:
            simulator.empty_cache()


def test_the_command_prints_it(capsys):
    path = next(path for path in files("truth") if path.name.startswith("train-1-round4"))
    assert replay(["--requests", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == {"conf", "trace", "stats", "segments", "oom"}
    assert printed["conf"] == "roundup_power2_divisions:4"
    assert printed["oom"]["at"] == 1604
    assert printed["oom"]["requested_bytes"] == read_case(path)["requests"][1604][2]
    assert printed["trace"][-1][0] == "oom"
    assert printed["segments"] == read_case(path)["expect"]["segments"]
