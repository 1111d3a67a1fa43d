"""What `probe_cost` runs where torch has CUDA, real or pretended: it prints one JSON object of figures, a list a round."""

import gc
import json
import sys
import threading
import time
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

from allocscope import probe
from allocscope.probe import app

CALLS, MAPS = 200, 10
SEGMENTS, BLOCKS = 335, 2000
ROUND_S = 5.0


def started(socket: str) -> app.Probe:
    """The probe, once it samples."""
    probe.start(job="bench", socket=socket)
    found = app._probe
    assert found is not None
    while found._sampler is None or not len(found._sampler._allocators):
        torch.empty(1024, device="cuda")
    return found


def each(call, times: int) -> float:
    """Seconds of this thread's CPU time a call: what other threads and processes do meanwhile is not in it."""
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times


def sample_and_map(sampler, rounds: int) -> dict[str, list[float]]:
    """Beside the bare calls of torch, in turn; the probe's own thread waits meanwhile."""
    raw, allocator = torch._C._cuda_memoryStats, next(iter(sampler._allocators))
    figures: dict[str, list[float]] = {"raw_s": [], "sample_s": [], "driver_s": [], "snapshot_s": [], "map_s": []}
    held = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(BLOCKS)]
    held += [torch.empty(12 << 20, dtype=torch.uint8, device="cuda") for _ in range(SEGMENTS)]
    del held[:BLOCKS:2]
    for _ in range(rounds):
        figures["raw_s"].append(each(lambda: raw(0), CALLS))
        figures["sample_s"].append(each(lambda: sampler._sample(allocator), CALLS))
        figures["driver_s"].append(each(lambda: torch.cuda.mem_get_info(0), CALLS))
        figures["snapshot_s"].append(each(lambda: torch.cuda.memory.memory_snapshot(include_traces=False), MAPS))
        figures["map_s"].append(each(sampler._take_map, MAPS))
    del held
    torch.cuda.empty_cache()
    return figures


def allocate(seconds: float) -> float:
    """Allocations and frees a second, by one Python loop."""
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for size in (512, 4096, 1 << 20, 3 << 20):
            torch.empty(size, dtype=torch.uint8, device="cuda")
        count += 1
    return count / seconds


def train(seconds: float) -> float:
    """Steps a second of a small transformer."""
    workloads["train"](1)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        workloads["train"](1)
        count += 1
    return count / (time.perf_counter() - began)


def probe_cpu_s() -> float:
    """CPU time of the probe's own threads (proc(5), schedstat: nanoseconds)."""
    ours = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("allocscope")]
    return sum(int(Path(f"/proc/self/task/{tid}/schedstat").read_text().split()[0]) for tid in ours) / 1e9


class Switch:
    """Between the probe's thread and its work: off, it does nothing at all."""

    def __init__(self, at_work: app.Probe) -> None:
        self._probe, self._step = at_work, at_work.step
        at_work.step = self._step_if_on  # type: ignore[method-assign]
        self.turn(False)

    def turn(self, on: bool) -> None:
        self._on = on
        self._probe._stirred.set()

    def _step_if_on(self) -> float:
        return self._step() if self._on else 3600.0


def with_and_without(switch: Switch, loop, rounds: int) -> dict[str, list[float]]:
    """A loop with the probe at work and at rest, in turn, first the one and then the other; and what the probe's threads took."""
    figures: dict[str, list[float]] = {"with": [], "without": [], "probe_cpu": []}
    for number in range(rounds):
        for on in (number % 2 == 0, number % 2 == 1):
            gc.collect()
            switch.turn(on)
            began_s, cpu_s = time.perf_counter(), probe_cpu_s()
            figures["with" if on else "without"].append(loop(ROUND_S))
            if on:
                figures["probe_cpu"].append((probe_cpu_s() - cpu_s) / (time.perf_counter() - began_s))
    return figures


def main() -> None:
    socket, workloads_path, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    exec(compile(Path(workloads_path).read_text(), workloads_path, "exec"), workloads)
    torch.empty(1, device="cuda")
    at_work = started(socket)
    switch, sampler = Switch(at_work), at_work._sampler
    figures = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0),
        "calls": sample_and_map(sampler, rounds),
        "allocating": with_and_without(switch, allocate, rounds),
        "training": with_and_without(switch, train, rounds),
    }
    probe.stop(1.0)
    print(json.dumps(figures))


workloads: dict = {}
if __name__ == "__main__":
    main()
