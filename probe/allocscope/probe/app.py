"""The probe in a process: begun, ended, and inert in forked children."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allocscope.model.identity import Process
from allocscope.model.orders import Order
from allocscope.probe import torch_cuda
from allocscope.probe.allocators import Allocators
from allocscope.probe.capture_folder import CaptureFolder
from allocscope.probe.capture_writer import CaptureWriter
from allocscope.probe.captures import Captures
from allocscope.probe.clock import Clock
from allocscope.probe.history import History
from allocscope.probe.identity import Place, Who
from allocscope.probe.log import log
from allocscope.probe.reports import Reports, Shortage
from allocscope.probe.sampler import Sampler
from allocscope.probe.signals import HeldOff
from allocscope.probe.tensors import end_reports
from allocscope.probe.torch_blocks import TorchBlocks
from allocscope.probe.torch_cuda import Absence, Backend, TorchCuda
from allocscope.probe.uplink import LONGEST_SOCKET_BYTES, Uplink

SYSTEM_SOCKET = "/run/allocscope/daemon.sock"
LOOK_INTERVAL_S = 0.25
"""Between two looks for an initialized CUDA: a few microseconds each, and an early OOM must not be missed."""
IDLE_INTERVAL_S = 10.0
"""Where nothing is to come."""
AT_EXIT_S = 0.8
"""The daemon acknowledges what is on its disk, at most a second after it got it; a job's end waits for most of that."""
LONGEST_CALL_S = 10.0
"""And so long, at most, for a snapshot or block map that is being taken just then: of a long history with stacks it takes seconds."""


class Probe:
    """One process's probe: a thread that looks for torch's allocator and, once it is there, samples it."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        job: str | None = None,
        place: Place = Place(),  # noqa: B008 (frozen)
        socket: str | None = None,
        clock: Clock = Clock(),  # noqa: B008 (frozen)
        stirred: threading.Event | None = None,
        modules: Mapping[str, Any] | None = None,
    ) -> None:
        self._environ, self._clock = environ, clock
        self._socket = _absolute(socket or socket_of(environ))
        self._started_us = clock.wall_us()
        self._stirred = stirred if stirred is not None else threading.Event()
        """Wakes the thread before its time."""
        self._is_stopping = False
        self._modules = sys.modules if modules is None else modules
        self._who = Who(environ, daemon=self._socket, job=job, place=place, modules=self._modules)
        self._allocators: Allocators | None = None
        self._blocks: TorchBlocks | None = None
        self._sampler: Sampler | None = None
        self._uplink: Uplink | None = None
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="allocscope-probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread, and give what is still to be sent `timeout_s` to arrive. A snapshot that is being taken is waited for."""
        self._is_stopping = True
        self._stirred.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s / 4)
            if self._blocks is not None and self._thread.is_alive():
                self._blocks.close(LONGEST_CALL_S)
        self._close_sampler()  # where the thread has not
        uplink = self._uplink
        if uplink is not None:
            left = uplink.close(timeout_s * 3 / 4)
            self._who.close()
            log.debug("allocscope: stopped; %d not acknowledged", left)

    def step(self) -> float:
        """One round; how many seconds to wait for the next."""
        if self._sampler is not None:
            if self._allocators is not None and self._who.look():
                self._allocators.amend(**self._who.standing._asdict())
            return self._sampler.step()
        found = torch_cuda.look(self._modules)
        if isinstance(found, Absence):
            self._say(f"does nothing: {found.value}" + (", yet" if found.may_pass else ""))
            return LOOK_INTERVAL_S if found.may_pass else IDLE_INTERVAL_S
        self._begin(found)
        return 0.0

    def on_oom(self, index: int, segment_bytes: int, total_bytes: int, free_bytes: int) -> None:
        if self._sampler is not None:
            self._sampler.on_oom(index, Shortage(segment_bytes, total_bytes, free_bytes))

    def _begin(self, torch: TorchCuda) -> None:
        process = self._who.process(self._started_us, torch.version, torch.allocator_conf(self._environ))
        uplink = Uplink(self._socket, process, on_order=self._obey)
        self._uplink, self._sampler = uplink, self._new_sampler(torch, uplink, process)
        uplink.start()
        _observe_oom_once(torch)
        self._say(f"samples as process {process.process_id} of job {process.job!r}, for the daemon at {self._socket}")
        if torch.backend is not Backend.NATIVE:
            self._say(f"torch's allocator is {torch.backend.value}, which tells {_KNOWN_OF[torch.backend]}")

    def _new_sampler(self, torch: TorchCuda, uplink: Uplink, process: Process) -> Sampler:
        blocks = self._blocks = TorchBlocks(self._modules, torch.backend)
        history = History(self._modules)
        allocators = self._allocators = Allocators(torch, uplink, process, self._environ)
        reports = Reports(torch, uplink, process.process_id, self._clock)
        writer = CaptureWriter(torch, blocks, allocators, CaptureFolder(self._socket))
        captures = Captures(allocators, writer, history, self._clock)
        return Sampler(torch, blocks, history, allocators, reports, captures, self._clock)

    def _obey(self, order: Order) -> None:
        if self._sampler is not None:
            self._sampler.obey(order)
            self._stirred.set()

    def _run(self) -> None:
        delay_s = 0.0
        while True:
            self._stirred.wait(delay_s)
            self._stirred.clear()
            try:
                if self._is_stopping:
                    return self._close_sampler()
                delay_s = self.step()
            except Exception as error:  # noqa: BLE001 (never into the job)
                self._say(f"a round failed, the next follows: {error!r}")
                delay_s = IDLE_INTERVAL_S

    def _close_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.info("allocscope: %s", text)


_KNOWN_OF = {
    Backend.ASYNC: "a few counters: no blocks, no history, no OutOfMemoryErrors",
    Backend.PLUGGABLE: "nothing: only which devices the process uses is reported",
}

_starting = threading.RLock()
_probe: Probe | None = None
_is_child = False
_observes_oom = False


def start(
    *,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    socket: str | None = None,
    in_child: bool = False,
) -> None:
    """Watch this process's allocators from now on. Once is enough; again does nothing. Never raises, never waits.

    What is not given is taken from torch.distributed and the launcher (`allocscope.probe.launchers` knows which), when it is known.
    A child forked from a process with a probe has none of its own, unless it asks with `in_child=True`.
    `ALLOCSCOPE_DISABLE=1` makes this do nothing.
    """
    global _probe, _is_child
    try:
        with _starting:
            if _probe is not None or is_disabled(os.environ) or (_is_child and not in_child):
                return
            probe = Probe(os.environ, job=job, place=Place(rank, world_size, local_rank), socket=socket)
            probe.start()
            _probe, _is_child = probe, False
            atexit.register(_at_exit, os.getpid())
    except Exception as error:  # noqa: BLE001 (never into the job)
        log.info("allocscope: the probe did not start: %r", error)


def stop(timeout_s: float = 2.0) -> None:
    """Watch no longer; waits at most `timeout_s` for the daemon to have what is still to be sent."""
    global _probe
    try:
        with _starting:
            probe, _probe = _probe, None
        if probe is not None:
            probe.stop(timeout_s)
    except Exception as error:  # noqa: BLE001 (never into the job)
        log.info("allocscope: the probe did not stop in order: %r", error)


def socket_of(environ: Mapping[str, str]) -> str:
    """Where the daemon listens: as told, or the system's, or the user's own daemon."""
    told = environ.get("ALLOCSCOPE_SOCKET", "").strip()
    if told:
        return told
    folder = environ.get("XDG_RUNTIME_DIR", "").strip()
    own = Path(folder, "allocscope", "daemon.sock") if folder else None
    return str(own) if own is not None and own.exists() and not Path(SYSTEM_SOCKET).exists() else SYSTEM_SOCKET


def _absolute(socket: str) -> str:
    """A job may go to another folder later, where the name would be another's, and so would the folder for captures."""
    try:
        absolute = str(Path(socket).absolute())
    except OSError:  # its folder is no more
        return socket
    return absolute if len(os.fsencode(absolute)) <= LONGEST_SOCKET_BYTES else socket


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Whether the probe is to do nothing."""
    return environ.get("ALLOCSCOPE_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def _observe_oom_once(torch: TorchCuda) -> None:
    """An observer cannot be taken off again, so there is one for all probes of this process."""
    global _observes_oom  # noqa: PLW0603
    if not _observes_oom:
        _observes_oom = torch.observe_oom(_on_oom)


def _on_oom(index: int, segment_bytes: int, total_bytes: int, free_bytes: int) -> None:
    """What this raised would replace the OutOfMemoryError (ALLOCATOR.md 7): only what the job's own handlers of signals raise may."""
    if _probe is None:
        return
    with HeldOff():
        try:
            _probe.on_oom(index, segment_bytes, total_bytes, free_bytes)
        except Exception as error:  # noqa: BLE001 (never into the job)
            log.debug("allocscope: an out-of-memory error was not told: %r", error)


def _at_exit(pid: int) -> None:
    if pid == os.getpid():
        end_reports()  # one of the probe's own thread, for which it is waited next
        stop(AT_EXIT_S)


def _after_fork_in_child() -> None:
    """Let go of everything without closing it: the threads are not here, and their locks may be held for ever."""
    global _probe, _is_child, _starting  # noqa: PLW0603
    _starting = threading.RLock()
    _is_child = _is_child or _probe is not None
    _probe = None


os.register_at_fork(after_in_child=_after_fork_in_child)
