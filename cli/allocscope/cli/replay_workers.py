"""Replays in several processes, each of which holds the requests; they end with this one, whatever ends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

Held = TypeVar("Held")
Job = TypeVar("Job")
Made = TypeVar("Made")
Done = Callable[[float], None]
"""Told now and then how much of a job is done, from 0 to 1."""

EVERY_S = 0.1
_MOST_JOBS = 4096
"""At once: how many can tell how far they are."""


class WorkerDied(Exception):  # noqa: N818 (it names what happened)
    """A worker process was ended by somebody else."""

    def __init__(self) -> None:
        super().__init__(
            "a worker process was killed, perhaps because the machine has too little memory; nothing is lost: try fewer settings"
            " at once, or one process (--processes 1)"
        )


def processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(Generic[Held, Job, Made]):
    """Processes that do jobs on what each of them holds; with one, this one. WorkerDied: one was killed."""

    def __init__(
        self,
        do: Callable[[Held, Job, Done], Made],
        held: Held,
        processes: int,
        tell: Callable[[float, int], None],
    ) -> None:
        """`do` and everything given must be such that pickle can hand it on. `tell` is told how many jobs are done, and of how many."""
        self._do, self._held, self._tell = do, held, tell
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            context = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
            self._done = context.Array("d", _MOST_JOBS, lock=False)
            self._pool = ProcessPoolExecutor(processes, context, _begin, (do, held, self._done))

    def __enter__(self) -> Workers[Held, Job, Made]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is not None:
            for worker in multiprocessing.active_children():
                worker.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def each(self, jobs: Sequence[Job]) -> Iterator[Made]:
        """What comes of them, in their order."""
        for start in range(0, len(jobs), _MOST_JOBS):
            yield from self._each(jobs[start : start + _MOST_JOBS])

    def _each(self, jobs: Sequence[Job]) -> Iterator[Made]:
        if self._pool is None:
            for at, job in enumerate(jobs):
                yield self._do(self._held, job, lambda share, at=at: self._tell(at + share, len(jobs)))  # type: ignore[misc]
            return
        self._done[: len(jobs)] = [0.0] * len(jobs)
        try:
            made = [self._pool.submit(_made, at, job) for at, job in enumerate(jobs)]
            for future in made:
                self._await(future, len(jobs))
                yield future.result()
        except BrokenProcessPool as error:
            raise WorkerDied from error

    def _await(self, future: Future[Any], jobs: int) -> None:
        while not wait((future,), EVERY_S, FIRST_COMPLETED).done:
            self._tell(sum(self._done[:jobs]), jobs)


_work: list[tuple[Callable[[Any, Any, Done], Any], Any, Any]] = []
"""Of a worker, one: what to do, with what, and where to tell how far it is."""


def _begin(do: Callable[[Any, Any, Done], Any], held: object, done: object) -> None:
    _work.append((do, held, done))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent, which ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _made(at: int, job: object) -> Any:
    [(do, held, done)] = _work

    def tell(share: float) -> None:
        done[at] = share

    made = do(held, job, tell)
    done[at] = 1.0
    return made
