"""Signals that come while the probe works: the job's handlers run a moment later, and what they raise is the job's."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from allocscope.probe.signals import HeldOff

ONE, OTHER = signal.SIGUSR1, signal.SIGUSR2


class Preempted(Exception):  # noqa: N818 (it names what happened)
    """Of a job's handler."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (ONE, OTHER)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raising(number: int, frame: Any) -> None:
    raise Preempted(number)


def record_of(number: int) -> tuple[bytes, bytes]:
    """Whose handler the system calls, and how (glibc's struct sigaction: handler, a mask of 128 bytes, flags)."""
    record = ctypes.create_string_buffer(512)
    assert ctypes.CDLL(None).sigaction(int(number), None, record) == 0
    return record.raw[:8], record.raw[136:140]


def test_a_handler_runs_once_the_probe_is_done_and_what_it_raises_is_the_jobs():
    signal.signal(ONE, raising)
    done = False

    def work() -> None:
        nonlocal done
        with HeldOff():
            try:
                signal.raise_signal(ONE)
                signal.raise_signal(ONE)
            except Exception:
                pytest.fail("amid the probe's work")
            done = True

    with pytest.raises(Preempted):
        work()
    assert done
    assert signal.getsignal(ONE) is raising
    with HeldOff():
        pass


def test_each_that_came_is_handled_in_its_turn_once():
    came: list[int] = []
    for number in (ONE, OTHER):
        signal.signal(number, lambda number, frame: came.append(number))
    with HeldOff():
        for number in (OTHER, ONE, OTHER):
            signal.raise_signal(number)
        assert came == []
    assert came == [OTHER, ONE]


def test_signals_that_no_python_handles_are_left_as_they_are():
    signal.signal(ONE, signal.SIG_IGN)
    signal.signal(OTHER, signal.SIG_DFL)
    with HeldOff():
        assert (signal.getsignal(ONE), signal.getsignal(OTHER)) == (signal.SIG_IGN, signal.SIG_DFL)
        signal.raise_signal(ONE)


def test_what_the_system_knows_of_a_handler_is_as_it_was():
    signal.signal(ONE, raising)
    signal.siginterrupt(ONE, False)
    before = record_of(ONE)
    with HeldOff():
        pass
    assert record_of(ONE) == before


def test_a_handler_of_a_library_that_lies_over_the_jobs_stays():
    came: list[int] = []
    in_c = ctypes.CFUNCTYPE(None, ctypes.c_int)(came.append)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    signal.signal(ONE, raising)
    libc.signal(ONE, ctypes.cast(in_c, ctypes.c_void_p))
    before = record_of(ONE)
    with HeldOff():
        assert record_of(ONE) == before
        signal.raise_signal(ONE)
        assert came == [ONE]
    assert record_of(ONE) == before


def test_in_another_thread_nothing_is_held_off():
    signal.signal(ONE, raising)
    seen: list[object] = []

    def work() -> None:
        with HeldOff():
            seen.append(signal.getsignal(ONE))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [raising]
