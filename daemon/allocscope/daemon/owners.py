"""Whose each process on a device is: user, container, pod, Slurm job.

The daemon's round asks, and never waits: a thread that nobody joins reads, since names of users may come over a network and the
kubelet may be slow. A process's owner is read once. What is not known is left out, and never guessed.
"""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import structlog

from allocscope.daemon import slurm
from allocscope.daemon.cgroups import Place, place
from allocscope.daemon.kubelet import KubeletError, PodSource
from allocscope.daemon.pods import Holders, PodName, container_name, pod_of
from allocscope.daemon.procfs import HostProcess, Procfs, printable
from allocscope.model.node import Owner

log = structlog.get_logger()

MOST_OWNERS = 4096
"""Processes that are remembered at a time."""
AGAIN_S, LONGEST_PAUSE_S = 10.0, 300.0
"""Until the kubelet is asked again for a pod whose name it did not tell; each time twice as long."""
_HOST_NAME = "HOSTNAME"


def user_name(uid: int) -> str:
    """The name of a user on this node, which may be asked of a directory over the network; a number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)


@dataclass(slots=True)
class _Asked:
    """A process that was asked for."""

    host: HostProcess
    devices: set[str] = field(default_factory=set)
    host_name: str | None = None
    owner: Owner | None = None
    is_read: bool = False
    again_s: float = 0.0
    pause_s: float = AGAIN_S

    @property
    def is_nameless(self) -> bool:
        return self.owner is not None and self.owner.pod_uid is not None and self.owner.pod is None


class Owners:
    """Asked in the daemon's round, answered by `look`, which runs in the thread."""

    def __init__(
        self,
        procfs: Procfs,
        pods: PodSource,
        *,
        name_of_user: Callable[[int], str] = user_name,
        round_: Callable[[], AbstractContextManager[None]] = nullcontext,
        question: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`round_` is around each look in the thread, `question` around each question to the kubelet."""
        self._procfs, self._pods, self._name_of_user = procfs, pods, name_of_user
        self._round, self._question = round_, question
        self._asked: dict[int, _Asked] = {}
        self._wake = threading.Event()
        self._is_stopped = False
        self.problem: str | None = None
        """Why the names of pods are not known; None: nothing is wrong."""

    # in the daemon's round

    def of(self, host: HostProcess, device: str, host_name: str | None = None) -> Owner | None:
        """What is known by now of a process that uses this device (a UUID); `host_name`: as the process itself sees it."""
        asked = self._asked.get(host.pid)
        if asked is None or asked.host.started_us != host.started_us:
            if asked is None and len(self._asked) >= MOST_OWNERS:
                return None
            asked = self._asked[host.pid] = _Asked(host)
        if not asked.is_read or device not in asked.devices or (host_name and asked.host_name != host_name):
            asked.devices |= {device}
            asked.host_name = host_name or asked.host_name
            asked.again_s = 0.0
            self._wake.set()
        return asked.owner

    def forget_others(self, pids: set[int]) -> None:
        """Who is not among these uses no device any more."""
        for pid in self._asked.keys() - pids:
            del self._asked[pid]

    # in the thread

    def start(self, clock: Callable[[], float]) -> None:
        """Begin to answer."""
        threading.Thread(target=self._run, args=(clock,), name="owners", daemon=True).start()

    def stop(self) -> None:
        """Answer no more."""
        self._is_stopped = True
        self._wake.set()

    def _run(self, clock: Callable[[], float]) -> None:
        while not self._is_stopped:
            self._wake.clear()
            try:
                with self._round():
                    pause_s = self.look(clock())
            except Exception:  # what is wrong with one process must not leave the others without owners
                log.exception("whose a process is cannot be told")
                pause_s = AGAIN_S
            self._wake.wait(pause_s)

    def look(self, now_s: float) -> float | None:
        """Read who is new, and ask for the names of pods; returns after how many seconds to look again, None: when woken."""
        asked = list(self._asked.values())
        for one in asked:
            if not one.is_read:
                one.is_read = True
                one.owner = self._read(one.host)
        nameless = [one for one in asked if one.is_nameless]
        if any(one.again_s <= now_s for one in nameless):
            self._name(nameless, now_s)
        return min((one.again_s - now_s for one in nameless if one.is_nameless), default=None)

    def _read(self, host: HostProcess) -> Owner | None:
        pid = host.pid
        where = place(self._procfs.read(pid, "cgroup") or "")
        mounts = self._procfs.read(pid, "mountinfo") if where.pod_uid else None
        owner = Owner(
            user=printable(self._name_of_user(host.uid)) if host.uid is not None else None,
            container_id=where.container_id,
            container=container_name(mounts, where.pod_uid) if mounts and where.pod_uid else None,
            pod_uid=where.pod_uid,
            **self._slurm(pid, where),
        )
        still = self._procfs.look_up(pid)
        if still is None or still.started_us != host.started_us or owner == Owner():
            return None  # what was read may be of another, who has its pid now
        return owner

    def _slurm(self, pid: int, where: Place) -> dict[str, str | None]:
        step = where.slurm if where.slurm.job else slurm.of_environ(self._procfs.environ(pid, slurm.VARIABLES))
        return {"slurm_job": step.job, "slurm_step": step.step}

    def _name(self, nameless: list[_Asked], now_s: float) -> None:
        names = self._pods.names()
        for one in nameless:
            if one.owner and one.owner.pod_uid and (name := names.get(one.owner.pod_uid)):
                one.owner = _named(one.owner, name)
        left = [one for one in nameless if one.is_nameless]
        given = self._holders() if left and self._pods.is_there else {}
        for one in left:
            self._name_by_device(one, given)
            one.again_s, one.pause_s = now_s + one.pause_s, min(2 * one.pause_s, LONGEST_PAUSE_S)

    def _holders(self) -> Holders:
        try:
            with self._question():
                given = self._pods.holders()
        except KubeletError as error:
            if self.problem is None:
                log.warning("pods without names", problem=str(error))
            self.problem = str(error)
            return {}
        self.problem = None
        return given

    def _name_by_device(self, one: _Asked, given: Holders) -> None:
        if one.owner is None or not given:
            return
        host_name = one.host_name or self._procfs.environ(one.host.pid, (_HOST_NAME,)).get(_HOST_NAME)
        holder = pod_of(set(one.devices), given, container=one.owner.container, host_name=host_name)
        if holder is not None:
            one.owner = replace(_named(one.owner, holder.name), container=holder.container)


def _named(owner: Owner, name: PodName) -> Owner:
    return replace(owner, namespace=name.namespace, pod=name.pod)
