"""In the rig the real allocator does again what it once did, request by request and to the byte, whatever the settings.

With ALLOCSCOPE_TEST_TRUTH=FOLDER the cases there are asked too.
"""

import gzip
import json
import os
from pathlib import Path

import pytest

from tests.gpuless.rig import Rig

FOLDERS = [
    Path(__file__).resolve().parent.parent / "allocator" / "truth",
    *map(Path, filter(None, [os.environ.get("ALLOCSCOPE_TEST_TRUTH")])),
]
CASES = [path for folder in FOLDERS for path in sorted(folder.glob("*.json.gz"))]
SEGMENT = ("address", "total_size", "stream", "type", "blocks")
REPLAY = Path(__file__).resolve().parent / "replay.py"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_a_case_comes_out_as_it_did(path, tmp_path):
    case = json.loads(gzip.decompress(path.read_bytes()))
    rig = Rig(tmp_path, capacity_bytes=case["device_total"], context_bytes=case["device_other"])
    settings = {"GPULESS_EVENTS": "pending", "PYTORCH_CUDA_ALLOC_CONF": case["conf"] or ""}
    done = rig.run(REPLAY, path, environ=settings)
    assert done.returncode == 0, done.stderr
    told, expected = json.loads(done.stdout), case["expect"]
    assert in_order(told["trace"]) == in_order(expected["trace"])
    assert told["oom"] == expected["oom"]
    assert [at for at, _ in told["marks"]] == [at for at, _ in expected["marks"]]
    for (_, stats), (at, wanted) in zip(told["marks"], expected["marks"], strict=True):
        assert {name: stats[name] for name in exact(wanted)} == exact(wanted), f"after {at} requests"
    assert {name: told["stats"][name] for name in exact(expected["stats"])} == exact(expected["stats"])
    assert sorted(map(live, told["segments"])) == sorted(
        live([s[name] for name in SEGMENT]) for s in expected["segments"]
    )
    assert told["device_free_end"] == case["device_free_end"]


def in_order(trace):
    """Frees of several streams that complete together do so in the order of a hash map in PyTorch: by address here."""
    ordered, together = [], []
    for entry in [*trace, None]:
        if entry and entry[0] == "free_completed":
            together.append(entry)
        else:
            ordered += [*sorted(together), entry]
            together = []
    return ordered


def exact(stats):
    """Without what follows from that order."""
    return {
        name: figure
        for name, figure in stats.items()
        if not (name.startswith("inactive_split") and name.endswith((".peak", ".allocated", ".freed")))
    }


def live(segment):
    """What a block that is free once was asked for means nothing."""
    address, size, stream, kind, blocks = segment
    return [
        address,
        size,
        stream,
        kind,
        [[a, s, asked * (state != "inactive"), state] for a, s, asked, state in blocks],
    ]
