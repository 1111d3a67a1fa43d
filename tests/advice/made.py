"""Made-up jobs, run on the simulated allocator, and what a snapshot would tell of them."""

from dataclasses import dataclass, field

from allocscope.allocator.errors import OutOfMemoryError
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.simulator.what_if import Source
from allocscope.allocator.snapshot import SnapshotBlock, SnapshotSegment

MIB = 1 << 20
START_US = 1_700_000_000_000_000


@dataclass
class Job:
    """A job on a device of so many MiB; it stops at its first OutOfMemoryError."""

    total_mib: int
    conf: str = ""
    version: str = "2.14.1"
    others: dict[int, int] = field(default_factory=dict)
    """By time in microseconds since the start: MiB that others use from then on."""
    dead: bool = False

    def __post_init__(self):
        self.allocator = Simulator(
            parse_settings(self.conf), Device(self.total_mib * MIB), version=self.version, trace=True
        )
        self.live: dict[str, int] = {}
        self.now_us = 0
        self.begun: list[tuple[int, int]] = []
        """How long the history was when each request came, and when that was."""

    def other_used(self, time_us):
        return (
            max([(since, mib) for since, mib in self.others.items() if since <= time_us - START_US], default=(0, 0))[1]
            * MIB
        )

    def malloc(self, name, mib, *, stream=0, pool=None):
        if self.dead:
            return
        self._tick()
        try:
            size = round(mib * MIB)
            self.live[name] = (
                self.allocator.malloc(size, stream) if pool is None else self.allocator.malloc_in(pool, size, stream)
            )
        except OutOfMemoryError:
            self.dead = True

    def free(self, *names):
        for name in names:
            if not self.dead:
                self._tick()
                self.allocator.free(self.live.pop(name))

    def source(self, **more):
        told = {
            "conf": self.conf,
            "settings": parse_settings(self.conf),
            "device_total_bytes": self.total_mib * MIB,
            "other_used": self.other_used,
            **more,
        }
        ends = [length for length, _ in self.begun[1:]] + [len(self.allocator.trace)]
        trace = [
            entry._replace(time_us=time_us)
            for (start, time_us), end in zip(self.begun, ends, strict=True)
            for entry in self.allocator.trace[start:end]
        ]
        return Source(trace=trace, segments=[_segment(each) for each in self.allocator.segments()], **told)

    def _tick(self):
        self.now_us += 1000
        self.begun.append((len(self.allocator.trace), START_US + self.now_us))
        self.allocator.device.other_bytes = self.other_used(START_US + self.now_us)


def _segment(told):
    return SnapshotSegment(
        device=0,
        address=told["address"],
        total_size=told["total_size"],
        stream=told["stream"],
        segment_type=told["segment_type"],
        pool_id=told["segment_pool_id"],
        is_expandable=told["is_expandable"],
        blocks=tuple(
            SnapshotBlock(each["address"], each["size"], each["requested_size"], each["state"])
            for each in told["blocks"]
        ),
    )


def fragmented(conf="", *, total_mib=1000, **more):
    """A job of which each step leaves a tensor in the middle of memory that it frees: the rest is too small for the next one."""
    job = Job(total_mib, conf, **more)
    job.malloc("weights", 100)
    for step in range(12):
        size = 40 + 4 * step
        job.malloc("activation", size)
        job.free("activation")
        job.malloc(f"kept {step}", size // 2 + 1)
    job.malloc("last", 90)
    return job


def steady(conf="", *, total_mib=1000, steps=30, **more):
    """A job that does the same again and again."""
    job = Job(total_mib, conf, **more)
    job.malloc("weights", 100)
    for _ in range(steps):
        for layer in range(10):
            job.malloc(f"activation {layer}", 20)
        for layer in reversed(range(10)):
            job.free(f"activation {layer}")
    return job


def leaking(*, total_mib=1000, steps=200):
    """A job that keeps a little of every step, until it dies."""
    job = Job(total_mib)
    job.malloc("weights", 100)
    for step in range(steps):
        for layer in range(10):
            job.malloc(f"activation {layer}", 20)
        job.malloc(f"kept {step}", 8)
        if job.dead:
            break
        for layer in reversed(range(10)):
            job.free(f"activation {layer}")
    return job
