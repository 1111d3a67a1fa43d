"""Of equally large free blocks each version takes its own first."""

import pytest

from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.simulator.rules import rules_of

MIB = 1 << 20
VERSIONS = ["2.11.0", "2.12.1", "2.13.0", "2.14.1"]


def made(version):
    return Simulator(parse_settings(""), Device(1024 * MIB), version=version)


@pytest.mark.parametrize(("version", "taken"), list(zip(VERSIONS, ["lower", "older", "older", "older"], strict=True)))
def test_between_segments(version, taken):
    """The lowest address up to 2.11, then the one that was got first, at whatever address."""
    simulator = made(version)
    first, older = simulator.malloc(30 * MIB), simulator.malloc(30 * MIB)
    simulator.free(first)
    simulator.empty_cache()
    lower = simulator.malloc(30 * MIB)
    assert lower == first < older
    simulator.free(lower)
    simulator.free(older)
    assert simulator.malloc(30 * MIB) == {"lower": lower, "older": older}[taken]


@pytest.mark.parametrize(("version", "taken"), list(zip(VERSIONS, [0, 3, 0, 0], strict=True)))
def test_within_a_segment(version, taken):
    """In 2.12 what is left of a split keeps its turn, and the front is a new block; otherwise the address decides."""
    simulator = made(version)
    blocks = [simulator.malloc(MIB // 2) for _ in range(4)]
    assert blocks == sorted(blocks)
    simulator.free(blocks[0])
    simulator.free(blocks[3])
    assert simulator.malloc(MIB // 2) == blocks[taken]


@pytest.mark.parametrize("version", ["2", "", "nightly"])
def test_what_is_no_version_is_refused(version):
    with pytest.raises(ValueError, match="is not a version of PyTorch"):
        rules_of(version)
