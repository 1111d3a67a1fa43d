"""The catalogue holds what INTERFACES names, once each, in base units."""

from __future__ import annotations

from allocscope.model.metrics import BY_NAME, CATALOGUE, Kind

PROMISED = {
    "allocscope_bill_bytes",
    "allocscope_device_memory_total_bytes",
    "allocscope_headroom_bytes",
    "allocscope_largest_free_block_bytes",
    "allocscope_reserved_bytes",
    "allocscope_allocated_bytes",
    "allocscope_alloc_retries_total",
    "allocscope_ooms_total",
    "allocscope_forecast_state",
    "allocscope_forecast_margin_ratio",
    "allocscope_forecast_seconds_to_oom",
    "allocscope_forecast_cause",
    "allocscope_samples_ingested_total",
    "allocscope_samples_rejected_total",
    "allocscope_spool_bytes",
    "allocscope_dropped_total",
}


def test_every_promised_name_is_there():
    assert not PROMISED - set(BY_NAME)


def test_names_are_unique_prefixed_and_end_in_their_unit():
    assert len(BY_NAME) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith("allocscope_")
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
        assert not metric.unit or metric.unit in metric.name.split("_")
        assert metric.help.endswith(".")


def test_a_bills_labels():
    assert BY_NAME["allocscope_bill_bytes"].labels == ("node", "gpu", "uuid", "job", "rank", "line")
    assert BY_NAME["allocscope_device_memory_total_bytes"].labels == ("node", "gpu", "uuid", "model")
