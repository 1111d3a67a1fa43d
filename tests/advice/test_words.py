"""What a trial gains and costs is said in phrases with its figures."""

from dataclasses import replace

import pytest

from allocscope.allocator.advice import costs_of, gains_of
from allocscope.model import Trial

MIB = 1 << 20
RECORDED = Trial(
    "",
    failed_at=1234,
    reserved_peak_bytes=1000 * MIB,
    stranded_peak_bytes=300 * MIB,
    num_alloc_retries=3,
    num_device_alloc=50,
    num_device_free=10,
    needed_bytes=1100 * MIB,
)


def trial(**figures):
    return replace(
        RECORDED, **({"conf": "expandable_segments:True", "failed_at": None, "needed_bytes": None} | figures)
    )


@pytest.mark.parametrize(
    ("tried", "gains", "costs"),
    [
        pytest.param(
            trial(needed_bytes=900 * MIB),
            [
                "every recorded request is served; as it was set request 1,234 failed",
                "100.00 MiB of 1000.00 MiB is left",
                "needs 200.00 MiB less than as it was set",
            ],
            [],
            id="room",
        ),
        pytest.param(
            trial(num_alloc_retries=0, num_device_alloc=1500, stranded_peak_bytes=20 * MIB),
            [
                "every recorded request is served; as it was set request 1,234 failed",
                "0 flushes of the cache instead of 3",
                "20.00 MiB in holes at most instead of 300.00 MiB",
            ],
            ["1,510 calls to the driver for memory instead of 60"],
            id="calls",
        ),
        pytest.param(
            trial(needed_bytes=1050 * MIB, num_device_alloc=51),
            [
                "every recorded request is served; as it was set request 1,234 failed",
                "needs 50.00 MiB less than as it was set",
            ],
            ["in the least room that there was at any time (1000.00 MiB) it would have failed"],
            id="too little room at times; what differs by less than a tenth is not told",
        ),
        pytest.param(
            trial(failed_at=99, num_alloc_retries=0),
            [],
            ["request 99 fails"],
            id="it fails, so its figures say nothing",
        ),
    ],
)
def test_gains_and_costs(tried, gains, costs):
    assert list(gains_of(tried, RECORDED, 1000 * MIB)) == gains
    assert list(costs_of(tried, RECORDED, 1000 * MIB)) == costs


def test_rounding_is_told_where_both_were_served():
    before = Trial("", allocated_peak_bytes=100 * MIB)
    after = Trial("roundup_power2_divisions:4", allocated_peak_bytes=112 * MIB)
    assert list(costs_of(after, before, None)) == ["12.00 MiB more allocated at most"]
    assert list(gains_of(after, before, None)) == []
