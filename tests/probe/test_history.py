"""A history recorded for a capture is given back; one that the program records is never touched."""

import math
import subprocess
import sys
from functools import partial

import pytest

from allocscope.probe.history import History
from tests import needs
from tests.probe.fake_torch import FakeTorch
from tests.probe.receiver import LONG_S

OURS = {"enabled": "all", "how": (None, "python", 1000, True)}
"""Without stacks, of 1000 entries, from an empty ring on."""


def user_records(torch: FakeTorch, *arguments, **named) -> None:
    """As a program does it."""
    torch.modules["torch.cuda.memory"]._record_memory_history(*arguments, **named)


def switches(torch: FakeTorch) -> int:
    return torch.calls.count("switch")


def test_it_is_switched_on_without_stacks_and_off_again():
    torch = FakeTorch()
    history = History(torch.modules)
    assert history.begin(1000) is None
    assert (torch.history, history.is_ours, history.most_entries) == (OURS, True, 1000)
    history.end()
    assert (torch.history, history.is_ours, history.interference, history.most_entries) == (None, False, None, 0)


@pytest.mark.parametrize(
    ("version", "how"),
    [((2, 1), {"enabled": "all", "how": (None, "python", 1000)}), ((2, 0), {"enabled": True, "how": (False, 1000)})],
)
def test_older_versions_are_spoken_to_in_their_words(version, how):
    torch = FakeTorch(version)
    torch.modules["torch._C"]._cuda_isHistoryEnabled = lambda: torch.history is not None
    history = History(torch.modules)
    assert history.begin(1000) is None
    assert torch.history == how
    history.end()
    assert torch.history is None


def test_a_version_that_does_not_tell_whether_one_is_recorded_is_left_alone():
    torch = FakeTorch((2, 0))
    problem = History(torch.modules).begin(1000)
    assert (
        problem
        == "this torch does not tell whether the program records a history, so none was recorded for this capture"
    )
    assert switches(torch) == 0


def test_a_version_without_a_history_says_so():
    torch = FakeTorch()
    del torch.modules["torch.cuda.memory"]._record_memory_history
    assert History(torch.modules).begin(1000) == "this torch cannot record a history"


def test_a_recording_that_fails_says_so_and_leaves_nothing_behind():
    torch = FakeTorch()
    before = dict(vars(torch.modules["torch._C"]))
    torch.fails["switch"] = RuntimeError("not supported")
    history = History(torch.modules)
    assert history.begin(1000) == "torch's recording of a history fails"
    assert not history.is_ours
    assert vars(torch.modules["torch._C"]) == before


def test_the_programs_own_goes_on():
    torch = FakeTorch()
    user_records(torch, "all", max_entries=50)
    history = History(torch.modules)
    assert history.begin(1000) is None
    assert (history.is_ours, history.most_entries) == (False, math.inf)
    history.end()
    assert torch.history == {"enabled": "all", "how": ("all", "all", 50, False)}
    assert switches(torch) == 1


def test_one_that_the_program_begins_meanwhile_is_its_own_and_goes_on():
    torch = FakeTorch()
    history = History(torch.modules)
    history.begin(1000)
    user_records(torch, "all", max_entries=50)
    history.end()
    assert torch.history == {"enabled": "all", "how": ("all", "all", 50, False)}
    assert history.interference == "the program began a history of its own"


def test_one_that_the_program_ends_and_begins_meanwhile_is_its_own_too():
    torch = FakeTorch()
    history = History(torch.modules)
    history.begin(1000)
    user_records(torch, None)
    user_records(torch, enabled="state")
    history.end()
    assert torch.history == {"enabled": "state", "how": ("all", "all", 2**63 - 1, False)}


def test_one_that_the_program_switches_off_is_over():
    torch = FakeTorch()
    history = History(torch.modules)
    history.begin(1000)
    user_records(torch, None)
    history.end()
    assert (torch.history, switches(torch)) == (None, 2)
    assert history.interference == "the program switched the history off, which was recorded for this capture"


def test_what_was_done_to_one_is_not_told_of_the_next():
    torch = FakeTorch()
    history = History(torch.modules)
    history.begin(1000)
    user_records(torch, "all", max_entries=50)
    history.end()
    history.begin(1000)
    assert history.interference is None


def test_a_call_of_the_programs_that_fails_changes_nothing():
    torch = FakeTorch()
    history = History(torch.modules)
    history.begin(1000)
    torch.fails["switch"] = RuntimeError("x")
    with pytest.raises(RuntimeError, match="x"):
        user_records(torch, "all")
    torch.fails.clear()
    assert history.is_ours
    history.end()
    assert torch.history is None


def test_torchs_calls_are_its_own_again_afterwards():
    torch = FakeTorch()
    before = dict(vars(torch.modules["torch._C"]))
    history = History(torch.modules)
    history.begin(1000)
    assert vars(torch.modules["torch._C"]) != before
    history.end()
    assert vars(torch.modules["torch._C"]) == before


def test_who_replaced_them_after_us_is_not_undone():
    torch = FakeTorch()
    binding = torch.modules["torch._C"]
    history = History(torch.modules)
    history.begin(1000)
    ours = binding._cuda_record_memory_history
    binding._cuda_record_memory_history = theirs = partial(ours)
    history.end()
    assert binding._cuda_record_memory_history is theirs
    user_records(torch, "all", max_entries=50)
    assert (torch.history or {})["enabled"] == "all"
    assert history.interference is None


def test_a_history_of_pinned_memory_is_not_ended():
    torch = FakeTorch()
    torch.host_traces = [{"action": "alloc"}]
    problem = History(torch.modules).begin(1000)
    assert problem == "the program records a history of pinned memory, which another one would end"
    assert switches(torch) == 0


def test_that_the_program_ever_recorded_one_is_remembered_and_ours_is_not():
    torch = FakeTorch()
    history = History(torch.modules)
    history.begin(1000)
    history.look()
    history.end()
    assert (history.is_programs, history.has_stacks) == (False, False)
    user_records(torch, "all")
    history.look()
    assert (history.is_programs, history.has_stacks) == (True, True)
    user_records(torch, None)
    history.look()
    assert (history.is_programs, history.has_stacks) == (False, True)


FORK = """
import os
from allocscope.probe.history import History
from tests.probe.fake_torch import FakeTorch
torch = FakeTorch()
binding = torch.modules["torch._C"]
before = binding._cuda_record_memory_history
history = History(torch.modules)
history.begin(1000)
with history._watching:
    child = os.fork()
    if child == 0:
        os._exit(7 if binding._cuda_record_memory_history == before and not history.is_ours else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), history.is_ours)
"""


def test_a_forked_child_has_torchs_own_calls_even_where_the_lock_was_held():
    done = subprocess.run(
        [sys.executable, "-c", FORK], check=False, cwd=needs.REPO, capture_output=True, text=True, timeout=LONG_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7 True\n", "")
