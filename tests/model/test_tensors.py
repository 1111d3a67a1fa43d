"""Who holds the tensors, as values: names and their patterns, plain forms, and what grows."""

import json

import pytest

from allocscope.model.tensors import (
    DeviceTensors,
    Growth,
    Holder,
    HolderKind,
    KindTotal,
    StorageRow,
    TensorGroup,
    TensorKind,
    TensorReport,
    View,
    growth,
)

LOSSES = Holder(
    HolderKind.VARIABLE, "losses[137]", "frame variable 'losses' of train() in train.py", "list of 138", line=41
)
KINDS = ("parameter", "buffer", "gradient", "optimizer_state", "activation", "other", "not_held")
BIG, SCALAR = View((512, 1024), "float32"), View((), "float32")


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (LOSSES, "losses[137] (list of 138 in frame variable 'losses' of train() in train.py:41)"),
        (Holder(HolderKind.GLOBAL, "cache['k']", "global variable 'cache' of __main__"),
         "cache['k'] (global variable 'cache' of __main__)"),
        (Holder(HolderKind.OBJECT, "<list of 3>[0]"), "<list of 3>[0]"),
        (Holder(HolderKind.OBJECT, "<Box>.x", container="Box"), "<Box>.x (Box)"),
    ],
)  # fmt: skip
def test_a_holder_is_told_in_one_line(holder, text):
    assert holder.text == text


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("losses[137]", "losses[*]"),
        ("nested['a'][0][3]", "nested['a'][*][*]"),
        ("cache['request-8f3a2b1c']", "cache['request-*']"),
        ("seen[(3, 'x')]", "seen[(*, 'x')]"),
        ("model.layers.0.weight", "model.layers.*.weight"),
        ("model.10", "model.*"),
        ("AdamW state 'exp_avg' of model.3.weight", "AdamW state 'exp_avg' of model.*.weight"),
        ("MulBackward0.other from losses[7]", "MulBackward0.other from losses[*]"),
        ("x1", "x1"),
        ("conv2.weight", "conv2.weight"),
    ],
)
def test_a_pattern_has_no_index(path, pattern):
    assert Holder(HolderKind.VARIABLE, path).pattern == pattern


@pytest.mark.parametrize(("view", "text"), [(BIG, "512x1024 float32"), (SCALAR, "scalar float32")])
def test_a_view_is_told_by_shape_and_type(view, text):
    assert view.text == text


# plain

REPORT = TensorReport(
    5,
    "cuda",
    took_us=7,
    complete=False,
    left_out=("9 objects",),
    devices=(DeviceTensors(0, 100, 160, 60), DeviceTensors(1, 8)),
    totals=(KindTotal(0, TensorKind.OTHER, 100, 1), KindTotal(0, TensorKind.NOT_HELD, 60)),
    groups=(TensorGroup(TensorKind.OTHER, "losses[*]", None, BIG, 1, 100),),
    rows=(StorageRow(0, 0x7F0000000000, 100, TensorKind.OTHER, 2, (BIG, SCALAR), 1, (LOSSES,), 3),),
    more_rows=2,
    more_rows_bytes=9,
)


@pytest.mark.parametrize("report", [REPORT, TensorReport(1, "cuda", absence="torch is not imported")])
def test_a_report_comes_back_from_its_plain_form_through_json(report):
    assert TensorReport.from_plain(json.loads(json.dumps(report.to_plain()))) == report


def test_the_plain_form_has_plain_values_only_and_leaves_out_what_is_not_known():
    plain = REPORT.to_plain()
    kinds = {type(value) for value in _all(plain)}
    assert kinds == {dict, list, str, int, bool}
    assert plain["devices"][1] == {"device_index": 1, "found_bytes": 8}
    assert plain["rows"][0]["kind"] == "other"
    assert "absence" not in plain


def _all(value):
    yield value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _all(item)


def test_what_another_version_told_more_is_passed_over_and_what_it_did_not_tell_has_its_default():
    report = TensorReport.from_plain({"time_us": 1, "device_type": "cuda", "colour": "green"})
    assert report == TensorReport(1, "cuda")


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (None, "tensor report should be an object, not NoneType 'None'"),
        ({"device_type": "cuda"}, "tensor report lacks 'time_us': it is not what TensorReport.to_plain() gives"),
        ({"time_us": "now", "device_type": "cuda"}, "tensor report.time_us should be int, not str 'now'"),
        ({"time_us": True, "device_type": "cuda"}, "tensor report.time_us should be int, not bool 'True'"),
        ({"time_us": 1, "device_type": "cuda", "rows": 3}, "tensor report.rows should be a list, not int '3'"),
        ({"time_us": 1, "device_type": "cuda", "rows": [3]}, "tensor report.rows[0] should be an object, not int '3'"),
        (REPORT.to_plain() | {"totals": [{"device_index": 0, "kind": "x", "bytes": 1}]},
         "tensor report.totals[0].kind should be " + " or ".join(KINDS) + ", not str 'x'"),
    ],
)  # fmt: skip
def test_what_is_no_report_is_refused_with_the_place(plain, message):
    with pytest.raises(ValueError) as refused:
        TensorReport.from_plain(plain)
    assert str(refused.value) == message


# growth


def of(*groups: TensorGroup) -> TensorReport:
    return TensorReport(1, "cuda", groups=groups)


def losses(count: int) -> TensorGroup:
    return TensorGroup(TensorKind.OTHER, "losses[*]", "frame variable 'losses'", BIG, count, count * 4 << 20)


WEIGHTS = TensorGroup(TensorKind.PARAMETER, "model.*.weight", None, BIG, 8, 8 << 20)
NAMELESS = TensorGroup(TensorKind.ACTIVATION, None, None, None, 1, 100)


def test_what_grows_between_two_reports_is_told_and_what_stays_is_not():
    assert growth(of(losses(3), WEIGHTS), of(losses(53), WEIGHTS)) == (
        Growth(TensorKind.OTHER, "losses[*]", "frame variable 'losses'", BIG, 50, 200 << 20),
    )


def test_most_bytes_come_first_and_what_is_new_counts_whole():
    grown = growth(of(losses(1)), of(NAMELESS, losses(2)))
    assert [(g.kind, g.storage_count, g.bytes) for g in grown] == [
        (TensorKind.OTHER, 1, 4 << 20),
        (TensorKind.ACTIVATION, 1, 100),
    ]


def test_what_shrinks_or_goes_is_no_growth():
    assert growth(of(losses(2), WEIGHTS), of(losses(1))) == ()


@pytest.mark.parametrize(
    ("grown", "text"),
    [
        (Growth(TensorKind.OTHER, "losses[*]", None, BIG, 50, 200 << 20), "losses[*] (512x1024 float32): +50 tensors, +200.00 MiB"),
        (Growth(TensorKind.OPTIMIZER_STATE, None, None, None, 1, 20), "optimizer state, no holder found: +1 tensors, +20 bytes"),
        (Growth(TensorKind.OTHER, "a", None, None, -1500, -3 << 30), "a: -1,500 tensors, -3.00 GiB"),
        (Growth(TensorKind.OTHER, "a", None, None, 1, 2048 << 30), "a: +1 tensors, +2.00 TiB"),
    ],
)  # fmt: skip
def test_growth_is_told_in_one_line(grown, text):
    assert grown.text == text
