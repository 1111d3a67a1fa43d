"""What the simulator costs a request, beside the same loop over a bare dict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from allocscope.allocator.simulator.replay import Case, Request, case_of, serve, simulator_of
from tests.bench.figures import Figure
from tests.simulator.recorded import HERE, read_case

ROUNDS, TIMES = 15, 3
CASES = {
    "default settings (a convolutional network, mixed sizes)": "conv_multiscale-default",
    "default settings (three streams, near full)": "small-1-default",
    "expandable segments": "leak_loss-expandable",
    "max_split_size_mb:128 (a mixture of experts)": "moe-maxsplit128",
}


def figures() -> Iterator[Figure]:
    """Requests a second of CPU time, without a history and with one; and a copy."""
    for what, name in CASES.items():
        case = case_of(read_case(HERE / "truth" / f"{name}.json.gz"), name)
        bare, plain, told = [], [], []
        for _ in range(ROUNDS):
            bare.append(_cpu_s(partial(_serve_bare, case.requests)))
            plain.append(_cpu_s(partial(_serve, case, trace=False)))
            told.append(_cpu_s(partial(_serve, case, trace=True)))
        count = len(case.requests)
        ratios = [p / b for p, b in zip(plain, bare, strict=True)]
        yield Figure(what, [count / s for s in plain], "requests/s", "300,000 or better")
        yield Figure(f"{what}, with its history", [count / s for s in told], "requests/s")
        yield Figure(f"{what}: the simulator / a bare dict", ratios, "")
        yield Figure(f"{what}: a copy, each block", list(_copies_us(case)), "µs")


def _cpu_s(call: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(TIMES):
        call()
    return (time.process_time() - began) / TIMES


def _serve(case: Case, *, trace: bool) -> None:
    serve(simulator_of(case, trace=trace), case.requests)


def _serve_bare(requests: tuple[Request, ...]) -> None:
    """As `serve`, but that it only remembers sizes."""
    held: dict[int, int] = {}
    for request in requests:
        kind = request[0]
        if kind == "a":
            held[request[1]] = request[2]
        elif kind == "f":
            held.pop(request[1])


def _copies_us(case: Case) -> Iterator[float]:
    simulator = simulator_of(case, trace=False)
    serve(simulator, case.requests)
    blocks = sum(len(segment["blocks"]) for segment in simulator.segments())
    for _ in range(ROUNDS):
        yield _cpu_s(simulator.copy) / blocks * 1e6
