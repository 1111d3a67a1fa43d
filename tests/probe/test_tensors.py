"""Who holds the tensors of a real torch process: all of it, by name, and without the process noticing."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allocscope.model.tensors import Growth, Holder, HolderKind, StorageRow, TensorKind, TensorReport, View, growth
from allocscope.probe import tensors
from allocscope.probe.tensors_pace import Pace
from tests import needs

JOB = Path(__file__).with_name("tensor_job.py")
HERE = "tensor_job.py"
FLOAT32 = 4
LONG_S = 100


class Job:
    """tensor_job.py in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, name: str) -> Any:
        """What that function of it gives."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], LONG_S)[0], f"the job stands still in {name}()"
        line = self._process.stdout.readline()
        assert line, f"the job died in {name}(), with {self._process.wait()}: see its stderr"
        return json.loads(line)

    def report(self, name: str) -> TensorReport:
        return TensorReport.from_plain(self(name))


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    python = needs.torch_python()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [
        str(python),
        "-W",
        "ignore",
        str(JOB),
    ]  # torch warns when it is imported; the job makes warnings errors after that
    process = subprocess.Popen(command, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Job(process)
    finally:
        process.kill()
        process.communicate()


def row(report: TensorReport, floats: int) -> StorageRow:
    """The one row of so many floats."""
    found = [row for row in report.rows if row.bytes == floats * FLOAT32]
    assert len(found) == 1, [row.bytes for row in report.rows]
    return found[0]


def named(report: TensorReport, floats: int) -> list[str]:
    """Its holders, without lines."""
    return [holder.text for holder in _without_lines(row(report, floats).holders)]


def _without_lines(holders: tuple[Holder, ...]) -> list[Holder]:
    return [Holder(h.kind, h.path, h.place, h.container) for h in holders]


def totals(report: TensorReport) -> dict[TensorKind, tuple[int, int | None]]:
    return {total.kind: (total.bytes, total.storage_count) for total in report.totals}


# what there is


def test_views_of_one_storage_are_one_row_that_shows_why_deleting_one_frees_nothing(job):
    found = row(job.report("views"), 100 * 1009)
    assert found.tensor_count == 3  # the base too: its views keep it
    assert set(found.views) == {View((100, 1009), "float32"), View((1, 1009), "float32"), View((1009, 99), "float32")}
    assert [(h.kind, h.path) for h in found.holders] == [(HolderKind.VARIABLE, "head"), (HolderKind.VARIABLE, "tail")]


def test_each_byte_of_a_model_in_training_has_its_kind(job):
    report = job.report("training")
    weights = 3 * (8 * 8 + 8) * FLOAT32
    told = totals(report)
    assert told[TensorKind.PARAMETER] == (weights, 6)
    assert told[TensorKind.GRADIENT] == (weights, 6)
    assert told[TensorKind.OPTIMIZER_STATE] == (2 * weights + 6 * FLOAT32, 18)  # exp_avg, exp_avg_sq, step
    assert told[TensorKind.BUFFER] == (1103 * FLOAT32, 1)
    assert TensorKind.ACTIVATION not in told  # the backward is done
    assert report.complete
    assert report.left_out == ()
    assert [d.found_bytes for d in report.devices] == [sum(r.bytes for r in report.rows)]


def test_a_model_in_training_is_told_by_the_names_of_its_parts(job):
    report = job.report("training")
    of_model = "Net in frame variable 'model' of training() in tensor_job.py"
    assert named(report, 1103) == [f"model.mask ({of_model})"]
    assert named(report, 1109) == [f"model.kept ({of_model})"]
    paths = {holder.path for one in report.rows for holder in one.holders}
    assert {f"model.layers.{n}.{part}" for n in range(3) for part in ("weight", "bias")} <= paths
    assert {f"model.layers.{n}.weight.grad" for n in range(3)} <= paths
    assert {f"AdamW state '{key}' of model.layers.1.weight" for key in ("exp_avg", "exp_avg_sq", "step")} <= paths
    assert {g.holder: g.storage_count for g in report.groups}["model.layers.*.weight"] == 3


NAMES = {
    1001: "GLOBAL (global variable 'GLOBAL' of __main__)",
    1201: "Thing.shared (attribute of a class)",
    1203: "numbers[1] (list of 2 in frame variable 'numbers' of names() in tensor_job.py)",
    1205: "nested['a'][0][3] (dict of 1 in frame variable 'nested' of names() in tensor_job.py)",
    1207: "thing.own (frame variable 'thing' of names() in tensor_job.py)",
    1209: "slotted.held (frame variable 'slotted' of names() in tensor_job.py)",
    1211: "line[0] (deque of 1 in frame variable 'line' of names() in tensor_job.py)",
    1213: "point.x (SimpleNamespace in frame variable 'point' of names() in tensor_job.py)",
    1215: "bound.args[0] (tuple of 1 in frame variable 'bound' of names() in tensor_job.py)",
    1217: "captured (frame variable 'captured' of names() in tensor_job.py)",
    1219: "unique{…} (set of 1 in frame variable 'unique' of names() in tensor_job.py)",
    1221: "local (variable 'local' of generator names.<locals>.generator() in tensor_job.py)",
    1223: "ordered['k'] (OrderedDict of 1 in frame variable 'ordered' of names() in tensor_job.py)",
    1225: "tensor (variable 'tensor' kept with the frame of fail() in tensor_job.py)",
    1227: "alone (closure of made() in frame variable 'made' of names() in tensor_job.py)",
}
"""By the number of floats."""


def test_what_holds_a_tensor_is_told_as_people_write_it(job):
    report = job.report("names")
    assert {floats: named(report, floats) for floats in NAMES} == {floats: [text] for floats, text in NAMES.items()}


def test_a_leak_is_what_grows_between_two_reports(job):
    told = job("leak")
    grown = growth(TensorReport.from_plain(told["before"]), TensorReport.from_plain(told["after"]))
    place = "frame variable 'losses' of leak() in tensor_job.py"
    inputs, outputs = View((16, 8), "float32"), View((), "float32")
    activations = [g for g in grown if g.kind is TensorKind.ACTIVATION]
    assert Growth(TensorKind.OTHER, "losses[*]", place, outputs, 50, 50 * FLOAT32) in grown
    assert {g.holder for g in activations} <= {
        f"{node} from losses[*]" for node in ("AddmmBackward0.mat1", "ExpBackward0.result")
    }
    assert {(g.place, g.view) for g in activations} == {(place, inputs)}
    # the input of each of three layers, and what its exp gave, which is the next one's input: four a step
    assert sum(g.storage_count for g in activations) == 50 * 4
    assert sum(g.bytes for g in activations) == 50 * 4 * 16 * 8 * FLOAT32
    assert grown[0].kind is TensorKind.ACTIVATION


# what autograd saved


def test_what_autograd_saved_is_told_with_the_node_and_where_it_is_reached_from(job):
    report = TensorReport.from_plain(job("saved")["before"])
    of_loss = "(frame variable 'loss' of saved() in tensor_job.py)"
    saved = next(r for r in report.rows if r.kind is TensorKind.ACTIVATION and r.bytes == 1303 * FLOAT32)
    assert {h.text for h in _without_lines(saved.holders)} == {
        f"SquareBackward.tensors from loss {of_loss}",
        f"ExpBackward0.result from loss {of_loss}",
    }
    assert f"SquareBackward.extra from loss {of_loss}" in named(report, 1301)
    assert row(report, 1301).kind is TensorKind.ACTIVATION


def test_after_its_backward_what_was_saved_is_gone_but_for_attributes_of_a_context(job):
    report = TensorReport.from_plain(job("saved")["after"])
    assert totals(report)[TensorKind.ACTIVATION] == (1301 * FLOAT32, 1)
    assert totals(report)[TensorKind.GRADIENT] == (1303 * FLOAT32, 1)


def test_hooks_of_the_job_are_not_run_and_what_they_hide_is_said_to_be_left_out(job):
    told = job("hooks")
    report = TensorReport.from_plain(told["report"])
    assert (told["unpacked"], told["runs"]) == (0, 1)  # the forward itself ran once
    assert len(report.left_out) == 1
    assert report.left_out[0].startswith(
        "3 saved tensors that hooks of the job have packed (checkpointing, offloading)"
    )
    packed = [h.path for one in report.rows for h in one.holders if h.path.startswith("packed ")]
    assert packed == ["packed SinBackward0.self from seen"]
    assert report.complete


def test_what_a_tensor_without_a_name_leads_to_is_told_by_one_that_leads_to_it(job):
    report = job.report("nameless")
    saved = [h.path for one in report.rows for h in one.holders if h.kind is HolderKind.AUTOGRAD]
    assert saved
    assert {path.partition(" from ")[2] for path in saved} == {"loss"}


def test_where_torch_does_not_tell_hooks_nothing_saved_is_read(job):
    report = job.report("torch_that_does_not_tell_hooks")
    assert report.left_out == (
        "what autograd saved: this torch does not tell which saved tensors hooks of the job have packed",
    )
    assert not report.complete
    assert TensorKind.ACTIVATION not in totals(report)


# what must not be touched


def test_a_report_keeps_nothing_alive_and_changes_nothing(job):
    told = job("nothing_changes")
    assert told["before"] == told["after"]
    assert told["died"]
    assert told["grad_is_none"]


def test_a_variable_that_a_running_function_lets_go_of_after_a_report_is_gone(job):
    assert job("variables_die")


def test_a_parameter_may_be_swapped_with_another_while_a_report_is_made(job):
    """torch refuses that where a weak reference leads to one of them."""
    assert job("swapped") == [True, 1441, 1439]


def test_no_code_of_the_objects_runs_and_what_they_hold_is_found_all_the_same(job):
    told = job("touchy")
    assert told["touched"] == []
    report = TensorReport.from_plain(told["report"])
    of_touchy = "in frame variable {!r} of touchy() in tensor_job.py"
    assert named(report, 1409) == [f"plain.tensor (Touchy {of_touchy.format('plain')})"]
    assert named(report, 1411) == ["odd.tensor (frame variable 'odd' of touchy() in tensor_job.py)"]
    assert named(report, 1413) == [f"mapping['k'] (TouchyDict of 1 {of_touchy.format('mapping')})"]
    assert named(report, 1415) == [f"items[0] (TouchyList of 1 {of_touchy.format('items')})"]
    assert named(report, 1417) == ["tensor (frame variable 'tensor' of touchy() in tensor_job.py)"]
    assert named(report, 1419) == [f"keyed[<TouchyKey>] (dict of 1 {of_touchy.format('keyed')})"]


def test_a_tuple_in_the_making_is_let_be(job):
    """Its elements that are not there yet would crash the process, and a reference to it would make it fail in the job."""
    told = job("half_made")
    assert told["length"] == 2
    assert row(TensorReport.from_plain(told["report"]), 1433).holders == ()


def test_what_has_no_storage_is_passed_over_and_what_a_wrapper_holds_is_the_wrappers(job):
    told = job("without_storage")
    assert told["touched"] == []
    report = TensorReport.from_plain(told["report"])
    sizes = {one.bytes // FLOAT32 for one in report.rows}
    assert report.left_out == (
        "2 tensors without a storage of their own (sparse ones, functorch's): what they hold is not told",
    )
    assert 1421 in sizes
    assert not sizes & {1423, 1425, 1427}
    inner = row(report, 1421)
    assert inner.kind is TensorKind.PARAMETER
    assert [h.path for h in inner.holders] == ["module.weight.inner"]


def test_a_nested_tensor_is_told_with_all_its_elements(job):
    told = job.report("nested")
    found = row(told, 1437 + 8)
    assert found.views == (View((1445,), "float32"),)
    assert [holder.path for holder in found.holders] == ["held"]
    assert told.complete


def test_modes_of_the_job_see_nothing_of_a_report(job):
    told = job("modes")
    assert told["seen"] == [0, 0]
    report = TensorReport.from_plain(told["report"])
    assert named(report, 1431) == ["held (frame variable 'held' of modes() in tensor_job.py)"]


# while the job goes on


def test_while_a_backward_runs_nothing_that_autograd_saved_is_touched(job):
    told = job("backward_running")
    during, after = (TensorReport.from_plain(told[moment]) for moment in ("during", "after"))
    assert (
        "what autograd saved: a backward pass was running, or the job was changing tensors in place" in during.left_out
    )
    assert not during.complete
    assert TensorKind.ACTIVATION not in totals(during)
    assert totals(after)[TensorKind.ACTIVATION] == (1501 * FLOAT32, 1)


def test_while_a_backward_is_in_a_hook_nothing_that_autograd_saved_is_touched(job):
    """The engine's threads for other devices go on meanwhile."""
    told = job("hook_running")
    during, after = (TensorReport.from_plain(told[moment]) for moment in ("during", "after"))
    assert TensorKind.ACTIVATION not in totals(during)
    assert totals(after)[TensorKind.ACTIVATION] == (1507 * FLOAT32, 1)


def test_a_collection_in_the_middle_of_a_look_lets_no_other_thread_run(job):
    assert job("collected") == {"let through": True, "during": False}


def test_in_a_program_with_an_audit_hook_what_no_other_thread_may_change_is_left_out(job):
    """Python calls it in the middle of a look, and other threads run meanwhile."""
    assert job("audited") == 0


def test_while_a_function_runs_that_sets_gradients_none_is_read(job):
    told = {name: TensorReport.from_plain(plain) for name, plain in job("at_gradients").items()}
    for name in ("_set_gradient", "_set_gradient_by_name", "_set_watched_gradient"):
        assert "gradients: a backward pass was running, or the job was at work on them" in told[name].left_out
        assert TensorKind.GRADIENT not in totals(told[name])
    assert totals(told["after"])[TensorKind.GRADIENT] == (1503 * FLOAT32, 1)


def test_a_backward_of_another_thread_is_seen_and_its_end_too(job):
    assert job("real_backward") == [True, True, [2]]


def test_a_tensor_that_another_thread_changes_in_place_is_not_looked_at_meanwhile(job):
    """Its node is replaced without the GIL: to read it then may crash the process."""
    saw = job("in_place")
    assert saw == dict.fromkeys(saw, True)
    assert len(saw) == 6


def test_what_other_threads_do_to_tensors_does_not_harm_a_look_at_them(job):
    looks = job("races")
    assert len(looks) == 7
    assert min(looks.values()) >= 10, looks


def test_a_training_that_is_reported_on_gives_what_it_gives_alone(job):
    told = job("meanwhile")
    assert told["same"]
    assert told["reports"] >= 1
    assert told["absences"] == []


def test_of_two_reports_at_once_the_second_says_so_at_once(job):
    assert job.report("two_at_once").absence == "another report is being made"


def test_a_child_forked_during_a_report_can_make_its_own(job):
    assert job("forked") == 0


ENDS_AMID_A_REPORT = """
import atexit, sys, threading
import torch
atexit.register(lambda: (thread.join(90), print(told[0].complete, *told[0].left_out)))  # the first comes last
from allocscope.probe import tensors
told = []
thread = threading.Thread(target=lambda: told.append(tensors(device_type="cpu", time_limit_s=600, rest_s=0.05)), daemon=True)
thread.start()
while sys.modules["allocscope.probe.tensors"]._pace is None:
    pass
"""


def test_a_report_of_another_thread_is_cut_short_where_python_ends():
    command = [str(needs.torch_python()), "-W", "ignore", "-c", ENDS_AMID_A_REPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("False ")
    assert "no time was left" in done.stdout


# bounds


def test_what_gc_freeze_hides_is_found(job):
    assert named(job.report("frozen"), 1601) == [
        "kept[0] (list of 1 in frame variable 'kept' of frozen() in tensor_job.py)"
    ]


def test_two_million_objects_more_are_no_trouble_and_a_limit_is_kept(job):
    told = job("two_million_objects")
    hasty, whole = TensorReport.from_plain(told["0.1"]), TensorReport.from_plain(told["60"])
    assert whole.complete
    assert not hasty.complete
    assert any("no time was left" in left or "stop the job" in left for left in hasty.left_out)
    # In the job's own processor time, whatever else this machine does: the limit, and one call that cannot be divided.
    assert told["cpu of 0.1"] < 1.5
    assert told["cpu of 60"] < 20


def test_rows_are_bounded_and_the_rest_is_summed_up(job):
    report = job.report("many")
    small = 3 * FLOAT32
    assert len(report.rows) == 5_000
    assert report.more_rows_bytes == report.more_rows * small
    kept = next(g for g in report.groups if g.holder == "kept[*]")
    assert (kept.storage_count, kept.bytes) == (7_000, 7_000 * small)
    assert totals(report)[TensorKind.OTHER][1] == len(report.rows) + report.more_rows


def test_without_time_it_says_that_it_looked_at_nothing(job):
    report = job.report("no_time")
    assert not report.complete
    assert report.rows == ()
    assert any("no time was left" in left for left in report.left_out)


# without


def test_without_torch_there_is_an_empty_report_that_says_so():
    assert "torch" not in sys.modules
    report = tensors()
    assert report.absence == "torch is not imported"
    assert report.rows == ()


def test_with_a_torch_without_cuda_there_is_an_empty_report_that_says_so(job):
    report = job.report("no_cuda")
    assert report.absence in {"this torch was built without CUDA", "CUDA is not initialized"}
    assert report.rows == ()


def test_a_failure_is_told_and_not_raised(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("boom")

    monkeypatch.setattr("allocscope.probe.tensors_report.report", fail)
    report = tensors()
    assert report.absence == "the report failed: RuntimeError('boom')"
    assert not report.complete


def test_without_a_lock_around_threads_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    report = tensors()
    assert report.absence == "this Python runs threads without a lock: they would change what is looked at"
    assert not report.complete


# pace


class Clock:
    def __init__(self):
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def seconds(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_work_rests_after_each_millisecond_where_it_is_to():
    clock = Clock()
    pace = Pace(1.0, 0.25, clock.seconds, clock.sleep)
    assert not pace.is_over()
    assert clock.slept_s == []
    clock.now_s = 0.5
    assert not pace.is_over()
    assert clock.slept_s == [0.25]
    clock.now_s = 0.9
    assert pace.is_over()


def test_what_is_ended_has_no_time_left_and_rests_no_more():
    clock = Clock()
    pace = Pace(1.0, 0.25, clock.seconds, clock.sleep)
    clock.now_s = 0.5
    pace.end()
    assert pace.is_over()
    pace.until(0.9)
    assert pace.is_over()
    assert not pace.wait()
    assert clock.slept_s == []


def test_a_part_of_the_work_has_its_part_of_the_time():
    clock = Clock()
    pace = Pace(2.0, seconds=clock.seconds, sleep=clock.sleep)
    pace.until(0.5)
    clock.now_s = 1.5
    assert pace.is_over()
    pace.until(0.9)
    assert not pace.is_over()
    assert not pace.wait()  # nobody is let run, so nothing is to be waited for
    assert clock.slept_s == []


def test_what_is_left_out_is_told_once_and_only_some_of_it_is_a_lack():
    pace = Pace(1.0)
    pace.leave_out("a", complete=True)
    pace.leave_out("a", complete=True)
    assert (pace.left_out, pace.complete) == (("a",), True)
    pace.leave_out("b")
    assert (pace.left_out, pace.complete) == (("a", "b"), False)
