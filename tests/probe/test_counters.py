"""A sample says what torch's nested statistics say, and leaves out what they do not."""

import pytest

from allocscope.model import COLUMNS, Sample
from allocscope.probe.counters import async_sample_of, is_used, sample_of
from tests.probe.fake_torch import stats

FIGURES = {
    "allocated_bytes": 100, "active_bytes": 200, "requested_bytes": 300, "reserved_bytes": 400, "inactive_split_bytes": 500,
    "allocation": 10, "active": 20, "segment": 30, "inactive_split": 40,
    "num_alloc_retries": 1, "num_ooms": 2, "num_device_alloc": 3, "num_device_free": 4, "num_sync_all_streams": 5,
}  # fmt: skip
WHOLE = Sample(
    sequence=9, time_us=1000,
    allocated_bytes=100, active_bytes=200, requested_bytes=300, reserved_bytes=400, inactive_split_bytes=500,
    allocated_peak_bytes=101, active_peak_bytes=201, requested_peak_bytes=301, reserved_peak_bytes=401,
    allocation_count=10, active_count=20, segment_count=30, inactive_split_count=40,
    allocations_total=12, allocated_bytes_total=102,
    num_alloc_retries=1, num_ooms=2, num_device_alloc=3, num_device_free=4, num_sync_all_streams=5,
    private_pools_reserved_bytes=0, device_total_bytes=1000, device_free_bytes=600, call_us=13,
)  # fmt: skip
KNOWN = {"call_us": 13, "device_total_bytes": 1000, "device_free_bytes": 600}


def known(sample: Sample) -> set[str]:
    return {name for name in COLUMNS if getattr(sample, name) is not None}


def test_every_figure_has_its_place():
    assert sample_of(stats(figures=FIGURES), 9, 1000, **KNOWN) == WHOLE


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        pytest.param((2, 14), set(), id="2.14"),
        pytest.param((2, 12), {"private_pools_reserved_bytes"}, id="2.12 has no figures of private pools"),
        pytest.param(
            (2, 0),
            {"private_pools_reserved_bytes", "num_sync_all_streams", "num_device_alloc", "num_device_free"},
            id="2.0 has fewer counters",
        ),
    ],
)
def test_a_version_that_does_not_tell_leaves_it_unknown(version, missing):
    sample = sample_of(stats(version, FIGURES), 9, 1000, **KNOWN)
    assert set(COLUMNS) - known(sample) == missing | {"process_used_bytes"}
    assert all(getattr(sample, name) == getattr(WHOLE, name) for name in known(sample))


@pytest.mark.parametrize("family", ["allocated_bytes", "requested_bytes", "segment"])
def test_a_family_without_its_figures_is_unknown_and_the_rest_is_not(family):
    nested = stats(figures=FIGURES)
    broken: object
    for broken in ({}, None, 5, {"all": None}, {"all": {}}):
        nested[family] = broken
        sample = sample_of(nested, 9, 1000, **KNOWN)
        assert (sample.active_bytes, sample.num_ooms) == (200, 2)
        assert getattr(sample, "segment_count" if family == "segment" else family) is None


def test_private_pools_are_summed():
    nested = stats(figures=FIGURES)
    nested["reserved_bytes_by_private_pools"] = {(0, 1): {"all": {"current": 7}}, (3, 0): {"all": {"current": 8}}}
    assert sample_of(nested, 1, 1).private_pools_reserved_bytes == 15
    nested["reserved_bytes_by_private_pools"] = {(0, 1): {}}
    assert sample_of(nested, 1, 1).private_pools_reserved_bytes is None


def test_no_statistics_make_an_empty_sample():
    assert sample_of({}, 1, 2) == Sample(1, 2)


def test_what_the_driver_did_not_tell_is_unknown():
    sample = sample_of(stats(), 1, 2)
    assert (sample.device_total_bytes, sample.device_free_bytes, sample.call_us) == (None, None, None)
    assert sample.allocated_bytes == 0


def test_of_the_drivers_allocator_only_what_it_counts_is_told():
    """All its other figures are there too, as 0 (ALLOCATOR.md 3.5)."""
    counted = {"allocated_bytes": 100, "active_bytes": 100, "reserved_bytes": 400}
    assert async_sample_of(stats(figures=counted), 9, 1000, **KNOWN) == Sample(
        sequence=9, time_us=1000,
        allocated_bytes=100, active_bytes=100, reserved_bytes=400,
        allocated_peak_bytes=101, active_peak_bytes=101, reserved_peak_bytes=401,
        device_total_bytes=1000, device_free_bytes=600, call_us=13,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "used"),
    [({}, True), ({"reserved_bytes": 5}, True), ({"reserved_bytes": 0, "allocation": -2}, False)],
    ids=["it once held something", "it holds something", "it never did"],
)
def test_a_device_is_in_use_from_its_first_allocation_on(figures, used):
    assert is_used(stats(figures=figures)) is used


def test_without_figures_a_device_is_not_in_use():
    assert not is_used({})
