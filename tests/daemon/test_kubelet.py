"""The kubelet is asked by its own API over its own socket; one that is slow, gone, back again or of another mind is told about."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import pytest

from allocscope.daemon.kubelet import Kubelet, KubeletError
from allocscope.daemon.pods import PodName
from allocscope.proto.kubelet.v1.pod_resources_pb2 import ListPodResourcesResponse, PodResources
from tests.daemon.fake_kubelet import GIVEN, WORKER, Lister, kubelet


class Hanging(Lister):
    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()

    def List(self, request, context):
        self.is_over.wait(60)
        return ListPodResourcesResponse()


class Raw(grpc.GenericRpcHandler):
    """Answers with bytes, whatever they are."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def service(self, handler_call_details):
        assert handler_call_details.method == "/v1.PodResourcesLister/List"
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self.answer)


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


def test_it_tells_who_was_given_which_device(socket):
    with kubelet(socket, lister=Lister(WORKER)):
        assert Kubelet(socket).holders() == GIVEN


def test_one_that_was_restarted_tells_again(socket):
    asked = Kubelet(socket)
    told = []
    for lister in (Lister(), Lister(WORKER)):
        with kubelet(socket, lister=lister):
            told.append((asked.is_there, asked.holders()))
        told.append((asked.is_there, {}))
    assert told == [(True, {}), (False, {}), (True, GIVEN), (False, {})]


def test_one_that_is_slow_is_not_waited_for(socket):
    hanging = Hanging()
    with kubelet(socket, lister=hanging):
        with pytest.raises(KubeletError, match=rf"at {socket}: no answer within 0\.2 s$"):
            Kubelet(socket, within_s=0.2).holders()
        hanging.is_over.set()


def test_a_socket_at_which_nobody_listens_is_told(socket):
    socket.touch()
    asked = Kubelet(socket)
    assert asked.is_there
    with pytest.raises(KubeletError, match=f"does not tell of its pods at {socket}: "):
        asked.holders()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"\x0a\xff", id="cut off"),
        pytest.param(b"\x0a\x04\x0a\x02\xff\xfe", id="not UTF-8"),
        pytest.param(b"<html>", id="of another kind"),
    ],
)
def test_nonsense_is_told_as_such(socket, answer):
    with kubelet(socket, Raw(answer)), pytest.raises(KubeletError, match="does not tell of its pods"):
        Kubelet(socket).holders()


def test_fields_of_newer_kubelets_are_passed_over(socket):
    cpu_ids, memory, later = b"\x1a\x02\x01\x02", b"\x22\x04\x0a\x02ab", b"\xfa\x01\x01x"
    container = WORKER.containers[0].SerializeToString() + cpu_ids + memory + later
    pod = b"\x0a\x0ellama-worker-0\x12\x06team-a\x1a" + bytes([len(container)]) + container + later
    with kubelet(socket, Raw(b"\x0a" + bytes([len(pod)]) + pod + later)):
        assert Kubelet(socket).holders() == GIVEN


def test_one_that_does_not_know_the_question_is_told(socket):
    with kubelet(socket), pytest.raises(KubeletError, match="Method not found"):
        Kubelet(socket).holders()


def test_an_answer_without_end_is_refused(socket):
    many = PodResources(name="x" * (17 << 20))
    with kubelet(socket, lister=Lister(many)), pytest.raises(KubeletError, match="larger than max"):
        Kubelet(socket).holders()


def test_without_a_kubelet_there_is_nobody_to_ask(tmp_path):
    asked = Kubelet(tmp_path / "no" / "kubelet.sock", tmp_path / "logs")
    assert not asked.is_there
    assert asked.names() == {}


def test_names_of_log_folders_are_names_of_pods(tmp_path):
    uid = "0c5d5f2a-6d0e-4f1b-9a4b-2f6f6a1c9e01"
    (tmp_path / f"team-a_llama-worker-0_{uid}").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert Kubelet(tmp_path / "kubelet.sock", tmp_path).names() == {uid: PodName("team-a", "llama-worker-0")}
