"""How fast `allocscope inspect` is and what memory it takes, beside a bare unpickling of the same file."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure

MIB = 1 << 20
_MEASURE = """
import gc, resource, sys, time
def bare(path):
    import pickle
    with open(path, "rb") as file:
        pickle.load(file)
def inspect(path):
    from allocscope.cli.inspect import main
    import contextlib, io
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([path, "--json"]) == 0
gc.disable()
began = time.process_time()
{"bare": bare, "inspect": inspect}[sys.argv[1]](sys.argv[2])
seconds = time.process_time() - began
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, peak / 1024)
"""


def figures(rounds: int = 3) -> Iterator[Figure]:
    """Seconds of one core, and MiB; each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for entries, ooms, aim_s, aim_mib in (
            (250_000, 0, "under 2", ""),
            (250_000, 20, "under 2", ""),
            (1_000_000, 0, "", "under 1000"),
        ):
            for stacks in (False, True):
                path = Path(folder) / "made.pickle"
                path.write_bytes(pickle.dumps(made(entries, stacks=stacks, ooms=ooms)))
                what = f"{entries:,} entries{f', {ooms} OOMs' if ooms else ''}{', with stacks' if stacks else ''}"
                pairs = [(_measured("inspect", path), _measured("bare", path)) for _ in range(rounds)]
                yield Figure(f"inspect {what}", [ours[0] for ours, _ in pairs], "s", aim_s)
                yield Figure("  as a ratio to bare unpickling", [ours[0] / bare[0] for ours, bare in pairs], "")
                yield Figure("  memory", [ours[1] for ours, _ in pairs], "MiB", aim_mib)
                yield Figure("  memory of bare unpickling", [bare[1] for _, bare in pairs], "MiB")


def _measured(which: str, path: Path) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, which, str(path)], capture_output=True, text=True, check=True
    )
    seconds, mib = map(float, done.stdout.split())
    return seconds, mib


def made(entries: int, *, stacks: bool, ooms: int = 0) -> dict[str, Any]:
    """A snapshot as PyTorch 2.14 writes it: 512 segments of 20 MiB, blocks of 2 MiB taken and given back in disorder.

    `ooms`: OutOfMemoryErrors, spread evenly through the history.
    """
    draw = random.Random(1)
    frames = [{"name": f"f{k}", "filename": f"/home/me/m{k % 40}.py", "line": k} for k in range(2000)]
    some = [draw.choices(frames, k=draw.randint(15, 45)) for _ in range(400)] if stacks else []
    segments = [0x7F00_0000_0000 + k * 20 * MIB for k in range(512)]
    free = [segment + k * 2 * MIB for segment in segments for k in range(10)]
    draw.shuffle(free)
    live: dict[int, int] = {}
    trace: list[dict[str, Any]] = []

    def told(action: str, address: int, size: int) -> None:
        rest = {
            "stream": 0,
            "time_us": 1_700_000_000_000_000 + 40 * len(trace),
            "compile_context": "".join(("N", "/A")),
        }
        stack = {"frames": list(draw.choice(some))} if some else {}
        trace.append({"action": action, "addr": address, "size": size, **rest, "user_metadata": "", **stack})

    for segment in segments:
        told("segment_alloc", segment, 20 * MIB)
    failing = [entries * k // (ooms + 1) for k in range(ooms, 0, -1)]
    while len(trace) < entries:
        if failing and len(trace) >= failing[-1]:
            failing.pop()
            told("oom", 0, 40 * MIB)
            del trace[-1]["addr"]
            trace[-1]["device_free"] = 8 * MIB
        elif len(live) < 3000 or draw.random() < 0.5:
            address = free.pop()
            live[address] = draw.randint(2 * MIB - 511, 2 * MIB)
            told("alloc", address, live[address])
        else:
            address = next(iter(live))
            size = live.pop(address)
            free.insert(draw.randrange(len(free) + 1), address)
            told("free_requested", address, size)
            told("free_completed", address, size)
    return {"segments": [_segment(address, live) for address in segments], "device_traces": [trace]}


def _segment(address: int, live: dict[int, int]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for at in range(address, address + 20 * MIB, 2 * MIB):
        state = "active_allocated" if at in live else "inactive"
        if state == "inactive" and blocks and blocks[-1]["state"] == state:
            blocks[-1]["size"] += 2 * MIB
        else:
            blocks.append({"address": at, "size": 2 * MIB, "requested_size": live.get(at, 0), "state": state})
    return {
        "device": 0,
        "address": address,
        "total_size": 20 * MIB,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
    }
