"""Who is on the node: those who report, and not for longer than they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allocscope.allocator.settings import AllocatorSettings
from allocscope.daemon import node as node_module
from allocscope.daemon.node import Node
from allocscope.model import Device, Process, Sample
from allocscope.model.wire import WireError, process_to_wire

PROCESS = Process("a" * 32, "train", 7, "host", 1, devices=(Device("GPU-1", 0),))


def attach(node: Node, process: Process = PROCESS, stream: object = "stream", now_s: float = 0.0):
    return node.attach(process, process_to_wire(process), stream, now_s)


def retire(node: Node, now_s: float, alive: bool | None = None) -> list[str]:
    gone = node.retire(now_s, gone_after_s=30, silent_after_s=300, is_alive=lambda _: alive)
    return [attached.process.job for attached in gone]


def test_a_further_hello_adds_a_device_and_keeps_what_is_known():
    node = Node()
    attached = attach(node)
    attached.allocators["GPU-1"].sample = Sample(1, 1)
    more = replace(PROCESS, devices=(Device("GPU-1", 0), Device("GPU-2", 1)))
    assert attach(node, more) is attached
    assert {uuid: a.sample for uuid, a in attached.allocators.items()} == {"GPU-1": Sample(1, 1), "GPU-2": None}


def test_a_process_id_is_one_process():
    node = Node()
    attach(node)
    with pytest.raises(WireError) as caught:
        attach(node, replace(PROCESS, pid=8), stream="another")
    assert caught.value.reason == "process_id_taken"


def test_the_number_of_processes_is_bounded(monkeypatch):
    monkeypatch.setattr(node_module, "MOST_PROCESSES", 1)
    node = Node()
    attach(node)
    with pytest.raises(WireError) as caught:
        attach(node, replace(PROCESS, process_id="b" * 32))
    assert (caught.value.reason, len(node)) == ("too_many_processes", 1)


def test_the_number_of_allocators_is_bounded(monkeypatch):
    monkeypatch.setattr(node_module, "MOST_ALLOCATORS", 2)
    node = Node()
    attach(node)
    attach(node, replace(PROCESS, devices=(Device("GPU-1", 0), Device("GPU-2", 1))))
    with pytest.raises(WireError) as caught:
        attach(node, replace(PROCESS, process_id="b" * 32))
    assert (caught.value.reason, len(node)) == ("too_many_allocators", 1)


@pytest.mark.parametrize(
    ("stopped", "alive", "stays_s"),
    [
        pytest.param(False, None, 30, id="a stream that broke may come again"),
        pytest.param(False, True, 30, id="likewise where the process is there"),
        pytest.param(False, False, -1, id="a process that is not there has gone"),
        pytest.param(True, True, -1, id="who says goodbye goes"),
    ],
)
def test_without_a_stream_a_process_goes(stopped, alive, stays_s):
    node = Node()
    attach(node).stopped = stopped
    node.detach("stream", 100.0)
    if stays_s >= 0:
        assert retire(node, 100.0 + stays_s, alive) == []
    assert retire(node, 100.0 + stays_s + 1, alive) == ["train"]
    assert len(node) == 0


def test_with_a_stream_a_process_stays_until_it_has_been_silent_for_long():
    node = Node()
    attach(node)
    assert retire(node, 300.0, alive=True) == []
    assert retire(node, 301.0, alive=True) == ["train"]


def test_a_stream_that_ends_late_does_not_detach_who_came_back_on_another():
    node = Node()
    attach(node, stream="first")
    attached = attach(node, stream="second")
    node.detach("first", 1.0)
    assert attached.stream == "second"


def test_settings_that_are_not_understood_are_not_known():
    node = Node()
    assert attach(node, replace(PROCESS, allocator_conf="{}")).settings is None
    expandable = AllocatorSettings(expandable=True)
    assert attach(node, replace(PROCESS, allocator_conf="expandable_segments:True")).settings == expandable


def test_who_is_gone_is_remembered_for_a_while(monkeypatch):
    monkeypatch.setattr(node_module, "GONE_REMEMBERED", 2)
    node = Node()
    assert node.introduction(PROCESS.process_id) is None
    for letter in "abc":
        attach(node, replace(PROCESS, process_id=letter * 32))
    assert [bool(node.introduction(letter * 32)) for letter in "abc"] == [True, True, True]
    retire(node, 1000)
    found = node.introduction("c" * 32)
    assert found is not None
    assert (found.process, found.message) == (
        replace(PROCESS, process_id="c" * 32),
        process_to_wire(replace(PROCESS, process_id="c" * 32)),
    )
    assert [bool(node.introduction(letter * 32)) for letter in "abc"] == [False, True, True]
