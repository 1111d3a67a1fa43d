"""The probe in a process: begun, ended, and inert in forked children."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allocscope.probe import torch_cuda
from allocscope.probe.identity import Place, identify
from allocscope.probe.sampler import Clock, Sampler
from allocscope.probe.torch_cuda import Absence, TorchCuda
from allocscope.probe.uplink import Uplink

log = logging.getLogger("allocscope.probe")

SYSTEM_SOCKET = "/run/allocscope/daemon.sock"
LOOK_INTERVAL_S = 0.25
"""Between two looks for an initialized CUDA: a few microseconds each, and an early OOM must not be missed."""
IDLE_INTERVAL_S = 10.0
"""Where nothing is to come."""
AT_EXIT_S = 0.8
"""The daemon acknowledges what is on its disk, at most a second after it got it; a job's end waits for most of that."""


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
        stopping: threading.Event | None = None,
        modules: Mapping[str, Any] | None = None,
    ) -> None:
        self._environ, self._job, self._place, self._clock = environ, job, place, clock
        self._socket = socket or socket_of(environ)
        self._started_us = clock.wall_us()
        self._stopping = stopping if stopping is not None else threading.Event()
        self._modules = modules
        self._sampler: Sampler | None = None
        self._uplink: Uplink | None = None
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="allocscope-probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread, and give what is still to be sent `timeout_s` to arrive."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s / 4)
        sampler, uplink = self._sampler, self._uplink
        if sampler is not None and uplink is not None:
            sampler.say_stopped()
            left = uplink.close(timeout_s * 3 / 4)
            log.debug("allocscope: stopped; %d not acknowledged", left)

    def step(self) -> float:
        """One round; how many seconds to wait for the next."""
        if self._sampler is not None:
            return self._sampler.step()
        found = torch_cuda.look(self._modules)
        if isinstance(found, Absence):
            self._say(f"does nothing: {found.value}" + (", yet" if found.may_pass else ""))
            return LOOK_INTERVAL_S if found.may_pass else IDLE_INTERVAL_S
        self._begin(found)
        return 0.0

    def on_oom(self, index: int, segment_bytes: int, total_bytes: int, free_bytes: int) -> None:
        if self._sampler is not None:
            self._sampler.on_oom(index, segment_bytes, total_bytes, free_bytes)

    def _begin(self, torch: TorchCuda) -> None:
        process = identify(
            self._environ,
            started_us=self._started_us,
            job=self._job,
            place=self._place,
            torch_version=torch.version,
            allocator_conf=torch.allocator_conf(self._environ),
        )
        uplink = Uplink(self._socket, process, on_order=self._obey)
        sampler = Sampler(torch, uplink, process, self._environ, self._clock)
        self._uplink, self._sampler = uplink, sampler
        uplink.start()
        _observe_oom_once(torch)
        self._say(f"samples as process {process.process_id} of job {process.job!r}, for the daemon at {self._socket}")

    def _obey(self, order: Any) -> None:
        if self._sampler is not None:
            self._sampler.obey(order)

    def _run(self) -> None:
        delay_s = 0.0
        while not self._stopping.wait(delay_s):
            try:
                delay_s = self.step()
            except Exception as error:  # noqa: BLE001 (never into the job)
                self._say(f"a round failed, the next follows: {error!r}")
                delay_s = IDLE_INTERVAL_S

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.info("allocscope: %s", text)


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

    What is not given is taken from the launcher's environment (torchrun, Slurm, Open MPI, Ray, Kubernetes).
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


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Whether the probe is to do nothing."""
    return environ.get("ALLOCSCOPE_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def _observe_oom_once(torch: TorchCuda) -> None:
    """An observer cannot be taken off again, so there is one for all probes of this process."""
    global _observes_oom  # noqa: PLW0603
    if not _observes_oom:
        _observes_oom = torch.observe_oom(_on_oom)


def _on_oom(index: int, segment_bytes: int, total_bytes: int, free_bytes: int) -> None:
    """What this raised would replace the OutOfMemoryError (ALLOCATOR.md 7)."""
    try:
        if _probe is not None:
            _probe.on_oom(index, segment_bytes, total_bytes, free_bytes)
    except Exception as error:  # noqa: BLE001 (never into the job)
        log.debug("allocscope: an out-of-memory error was not told: %r", error)


def _at_exit(pid: int) -> None:
    if pid == os.getpid():
        stop(AT_EXIT_S)


def _after_fork_in_child() -> None:
    """Let go of everything without closing it: the threads are not here, and their locks may be held for ever."""
    global _probe, _is_child, _starting  # noqa: PLW0603
    _starting = threading.RLock()
    _is_child = _is_child or _probe is not None
    _probe = None


os.register_at_fork(after_in_child=_after_fork_in_child)
