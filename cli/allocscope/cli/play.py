"""`allocscope play`: toward a daemon, a recorded process behaves as it did, by the very way that a probe takes.

The recording's start becomes the wall clock's now (or --start-at); from then on what is sent carries the recording's own
time, shifted, and at speed X it is sent X times as fast: the job's clock then runs ahead of the wall's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from allocscope.allocator.errors import AllocatorError
from allocscope.allocator.player import Player, Seen
from allocscope.allocator.recording import Recording, read_recording
from allocscope.model import AllocatorRef, BlockMap, Device, Event, EventKind, Process, Sample
from allocscope.probe.uplink import CAPACITY, Uplink

HELP = "behave, toward a daemon, as a recorded job did"
EXIT = """exit status: 0 the recorded job ended in order, or SIGINT or SIGTERM ended the play; 1 the recorded job died of an
OutOfMemoryError, as the real one did; 2 the recording or an option cannot be used; 3 the daemon has not acknowledged all
of it, however the job ended"""
UNACKNOWLEDGED = 3
REACHED_WITHIN_S = 2.0
"""A daemon that runs is there at once; one that starts along with us takes about a second."""
FINISHED, DIED, STOPPED = "finished", "died", "stopped"


def main(arguments: list[str]) -> int:
    """Play one recording to its end."""
    options = _parser().parse_args(arguments)
    try:
        recording = read_recording(options.recording)
        return _Play(recording, options).run()
    except AllocatorError as error:
        print(f"allocscope play: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allocscope play", description=f"{HELP}; it takes no orders: no captures", epilog=EXIT, allow_abbrev=False
    )
    parser.add_argument(
        "recording", metavar="RUN.run.json", help="what was recorded; the snapshot it names lies beside it"
    )
    parser.add_argument(
        "--speed",
        type=_speed,
        default=1.0,
        metavar="X",
        help="how many times as fast; its clock then runs ahead (default: 1)",
    )
    parser.add_argument(
        "--socket", default=None, metavar="PATH", help="the daemon's (default: $ALLOCSCOPE_SOCKET, or its usual place)"
    )
    parser.add_argument("--job", default=None, metavar="NAME", help="default: $ALLOCSCOPE_JOB, or the recording's name")
    parser.add_argument("--rank", type=_whole, default=0, metavar="N", help="default: 0")
    parser.add_argument("--world-size", type=_whole, default=1, metavar="N", help="default: 1")
    parser.add_argument("--gpu-uuid", default=None, metavar="U", help="default: one made of host, job and rank")
    parser.add_argument("--gpu-index", type=_whole, default=0, metavar="N", help="default: 0")
    parser.add_argument("--gpu-model", default=None, metavar="NAME", help="default: not told")
    parser.add_argument(
        "--start-at",
        type=_moment,
        default=None,
        metavar="WALL",
        help="begin at this unix time in seconds (default: now)",
    )
    parser.add_argument(
        "--flush-timeout",
        type=_speed,
        default=10.0,
        metavar="S",
        help="how long the daemon has, at the end, to acknowledge the rest (default: 10)",
    )
    parser.add_argument(
        "--json", action="store_true", help="at the end print one line: what was sent, and how it ended"
    )
    parser.add_argument("--verbose", action="store_true", help="tell on standard error what happens")
    return parser


def _speed(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _moment(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and 0 <= value < 1 << 40):
        raise argparse.ArgumentTypeError(f"{text} is not a unix time in seconds")
    return value


def _whole(text: str) -> int:
    value = _number(text)
    if not (0 <= value < 1 << 31 and value.is_integer()):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 on")
    return int(value)


def _number(text: str) -> float:
    """What is no number is not finite either."""
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(slots=True)
class _Sent:
    """How much was handed on."""

    samples: int = 0
    block_maps: int = 0
    events: int = 0
    oom_us: int | None = None

    @property
    def all(self) -> int:
        return self.samples + self.block_maps + self.events


class _Play:
    """One recording on its way."""

    def __init__(self, recording: Recording, options: argparse.Namespace) -> None:
        self._recording, self._options = recording, options
        self._stop = threading.Event()
        now_us = time.time_ns() // 1000
        self._start_us = now_us if options.start_at is None else round(options.start_at * 1e6)
        self._starts = time.monotonic() + (self._start_us - now_us) / 1e6
        self._shift_us = self._start_us - recording.start_us
        self._process = _process(recording, options, self._start_us)
        self._ref = AllocatorRef(self._process.process_id, self._process.devices[0].uuid)
        self._sent = _Sent()
        self._socket = options.socket or default_socket()

    def run(self) -> int:
        """Play until the end or a signal; the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stop.set())
        uplink = Uplink(self._socket, self._process)
        player = Player(self._recording, seed=_seed(self._process), allocator=self._ref)
        uplink.start()
        warning = threading.Timer(REACHED_WITHIN_S, self._warn_unless_reached, (uplink,))
        warning.daemon = True
        warning.start()
        try:
            ended = self._play(player, uplink)
        finally:
            warning.cancel()
            unacknowledged = uplink.close(self._options.flush_timeout)
        self._tell(ended)
        if unacknowledged:
            _say(
                f"{unacknowledged:,} of {self._sent.all:,} items were not acknowledged by a daemon at {self._socket}: does one run "
                "(allocscope daemon), and there (--socket)?"
            )
        if self._options.json:
            print(json.dumps(self._summary(ended, unacknowledged)), flush=True)
        if unacknowledged:
            return UNACKNOWLEDGED
        return 1 if ended == DIED else 0

    def _play(self, player: Player, uplink: Uplink) -> str:
        time_us = self._recording.start_us
        self._tell(f"job {self._process.job} on {self._ref.device_uuid}, {self._options.speed:g} times as fast")
        for seen in player:
            if not self._wait_until(seen.time_us):
                stopped = Event(self._process.process_id, 0, time_us, EventKind.STOPPED)
                self._hand_on(stopped, uplink)
                return STOPPED
            self._hand_on(seen, uplink)
            time_us = seen.time_us
        return DIED if player.died else FINISHED

    def _wait_until(self, recorded_us: int) -> bool:
        """Wait for that moment of the recording; at once where it is late. False: to be ended."""
        due = self._starts + (recorded_us - self._recording.start_us) / 1e6 / self._options.speed
        return not self._stop.wait(max(due - time.monotonic(), 0))

    def _hand_on(self, seen: Seen, uplink: Uplink) -> None:
        """Number it, give it this play's time, and hand it on, in one go as the uplink asks."""
        placed = replace(seen, sequence=uplink.next_sequence(), time_us=seen.time_us + self._shift_us)
        match placed:
            case Sample():
                uplink.sample(self._ref, placed)
                self._sent.samples += 1
            case BlockMap():
                uplink.block_map(self._ref, placed)
                self._sent.block_maps += 1
            case Event():
                uplink.event(placed)
                self._sent.events += 1
                if placed.kind is EventKind.OOM:
                    self._sent.oom_us = placed.time_us
                self._tell(
                    f"{placed.kind.value} at {(seen.time_us - self._recording.start_us) / 1e6:.1f} s of the recording"
                )

    def _warn_unless_reached(self, uplink: Uplink) -> None:
        if not uplink.is_reached:
            _say(f"no daemon answers at {self._socket} yet; going on, at most {CAPACITY:,} items are kept")

    def _tell(self, text: str) -> None:
        if self._options.verbose:
            _say(text)

    def _summary(self, ended: str, unacknowledged: int) -> dict[str, object]:
        sent = self._sent
        return {
            "job": self._process.job,
            "process_id": self._process.process_id,
            "samples": sent.samples,
            "block_maps": sent.block_maps,
            "events": sent.events,
            "unacknowledged": unacknowledged,
            "start_us": self._start_us,
            "oom_us": sent.oom_us,
            "ended": ended,
        }


def _say(text: str) -> None:
    print(f"allocscope play: {text}", file=sys.stderr, flush=True)


def _process(recording: Recording, options: argparse.Namespace, started_us: int) -> Process:
    host = socket.gethostname()
    job = options.job or os.environ.get("ALLOCSCOPE_JOB") or recording.name
    stable = uuid.uuid5(uuid.NAMESPACE_DNS, f"{host}/{job}/{options.rank}")
    device = Device(
        uuid=options.gpu_uuid or f"GPU-{stable}",
        index=options.gpu_index,
        model=options.gpu_model,
        total_bytes=recording.device_total_bytes,
        allowed_bytes=recording.allowed_bytes,
    )
    return Process(
        process_id=uuid.uuid4().hex,
        job=job,
        pid=os.getpid(),
        host=host,
        started_us=started_us,
        rank=options.rank,
        world_size=options.world_size,
        allocator_conf=recording.conf,
        program=recording.name,
        devices=(device,),
    )


def _seed(process: Process) -> int:
    """Maps of the plays of one recording need not fall together."""
    return int(process.process_id, 16)


def default_socket() -> str:
    """Where a probe looks for its daemon, if nobody says otherwise."""
    named = os.environ.get("ALLOCSCOPE_SOCKET")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return named or str(Path(runtime if runtime and os.geteuid() != 0 else "/run", "allocscope", "daemon.sock"))
