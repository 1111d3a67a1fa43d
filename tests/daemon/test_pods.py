"""A process is put to a pod by its device only where something of its own says the same."""

from __future__ import annotations

import pytest

from allocscope.daemon import pods
from allocscope.daemon.pods import Holder, PodName, container_name, holders, pod_names, pod_of
from allocscope.proto.kubelet.v1.pod_resources_pb2 import (
    ContainerDevices,
    ContainerResources,
    ListPodResourcesResponse,
    PodResources,
)

UID = "0c5d5f2a-6d0e-4f1b-9a4b-2f6f6a1c9e01"
TRAIN = Holder(PodName("team-a", "llama-worker-0"), "trainer")
SERVE = Holder(PodName("team-b", "serve-5d8f7c9b6d-x2x7k"), "server")
TWIN = Holder(PodName("team-b", "serve-5d8f7c9b6d-7zq4f"), "server")


def told(*given: tuple[str, str, str, list[str]]) -> ListPodResourcesResponse:
    return ListPodResourcesResponse(
        pod_resources=[
            PodResources(
                namespace=namespace,
                name=pod,
                containers=[
                    ContainerResources(
                        name=container, devices=[ContainerDevices(resource_name="nvidia.com/gpu", device_ids=ids)]
                    )
                ],
            )
            for namespace, pod, container, ids in given
        ]
    )


def test_devices_are_known_by_uuid_whole_shared_and_in_parts():
    response = told(
        ("team-a", "llama-worker-0", "trainer", ["GPU-1", "GPU-2"]),
        ("team-b", "serve-5d8f7c9b6d-x2x7k", "server", ["GPU-3::0", "MIG-4", "MIG-GPU-5/7/0"]),
        (
            "team-b",
            "serve-5d8f7c9b6d-7zq4f",
            "server",
            ["GPU-3::1", "GPU-3::2", "nvidia0", "nvidia0/gi0", "mlx5_0", ""],
        ),
    )
    assert holders(response) == {
        "GPU-1": (TRAIN,),
        "GPU-2": (TRAIN,),
        "GPU-3": (SERVE, TWIN),
        "MIG-4": (SERVE,),
        "MIG-GPU-5/7/0": (SERVE,),
    }


@pytest.mark.parametrize(
    "given",
    [
        ("team-a", "a\nb", "trainer", ["GPU-1"]),
        ("team-a", "x" * 254, "trainer", ["GPU-1"]),
        ("", "llama", "trainer", ["GPU-1"]),
        ("team-a", "llama", "\x1b[2J", ["GPU-1"]),
        ("team-a", "llama", "trainer", ["GPU-1\n", "GPU-" + "9" * 200, "GPU-é"]),
    ],
)
def test_what_cannot_be_a_name_is_passed_over(given):
    assert holders(told(given)) == {}


def test_no_more_devices_are_taken_than_a_node_can_have(monkeypatch):
    monkeypatch.setattr(pods, "MOST_DEVICE_IDS", 3)
    ids = ["GPU-1::0", "GPU-1::1", "GPU-2", "GPU-3"]
    assert set(holders(told(("team-a", "llama-worker-0", "trainer", ids)))) == {"GPU-1", "GPU-2"}


@pytest.mark.parametrize(
    ("uuids", "container", "host_name", "found"),
    [
        pytest.param({"GPU-1"}, "trainer", None, TRAIN, id="by its container's name"),
        pytest.param({"GPU-1"}, "trainer", "other-name", TRAIN, id="a pod may have another host name"),
        pytest.param({"GPU-1"}, None, "llama-worker-0", TRAIN, id="by its host name"),
        pytest.param({"GPU-1"}, None, None, None, id="nothing of its own says so"),
        pytest.param({"GPU-1"}, "exporter", "llama-worker-0", None, id="another container's"),
        pytest.param({"GPU-1"}, None, "gpu-exporter-7zq4f", None, id="a privileged pod uses what others were given"),
        pytest.param({"GPU-3"}, "server", None, None, id="it could be two"),
        pytest.param({"GPU-3"}, "server", "serve-5d8f7c9b6d-7zq4f", TWIN, id="it could be two, but for its host name"),
        pytest.param({"GPU-3", "GPU-4"}, "server", None, None, id="two devices do not tell which"),
        pytest.param({"GPU-9"}, "trainer", "llama-worker-0", None, id="nobody was given it"),
    ],
)
def test_whose_a_process_is(uuids, container, host_name, found):
    given = {"GPU-1": (TRAIN,), "GPU-3": (SERVE, TWIN), "GPU-4": (SERVE, TRAIN)}
    assert pod_of(uuids, given, container=container, host_name=host_name) == found


def test_log_folders_tell_namespace_name_and_uid():
    folders = [
        f"team-a_llama-worker-0_{UID}",
        f"kube-system_etcd-node.example_{'ab' * 16}",
        "lost+found",
        "a_b_c_d",
        f"team-a_{UID}",
        f"team\na_x_{UID}",
    ]
    assert pod_names(folders) == {
        UID: PodName("team-a", "llama-worker-0"),
        "ab" * 16: PodName("kube-system", "etcd-node.example"),
    }


@pytest.mark.parametrize(
    ("root", "found"),
    [
        (f"/var/lib/kubelet/pods/{UID}/containers/trainer/4e9d2c11", "trainer"),
        (f"/lib/kubelet/pods/{UID}/containers/trainer/4e9d2c11", "trainer"),
        (f"/var/lib/docker/volumes/x/_data/lib/kubelet/pods/{UID}/containers/trainer/4e9d2c11", "trainer"),
        (f"/var/lib/kubelet/pods/{'ab' * 16}/containers/trainer/4e9d2c11", None),
        (f"/var/lib/kubelet/pods/{UID}/volumes/trainer/4e9d2c11", None),
        (f"/home/u/pods/{UID}/containers/Tr-\x1b/4e9d2c11", None),
    ],
)
def test_what_the_kubelet_mounts_tells_the_containers_name(root, found):
    mountinfo = (
        f"28 1 259:2 / / rw - ext4 /dev/sda rw\n1849 1843 259:2 {root} /dev/termination-log rw - ext4 /dev/sda rw\n"
    )
    assert container_name(mountinfo, UID) == found
