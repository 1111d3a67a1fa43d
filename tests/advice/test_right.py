"""What is advised is held against replays that know nothing of advice, and against the real allocator.

`python -m tests.advice FOLDER` does so over whole folders.
"""

from dataclasses import replace

import pytest

from allocscope.allocator.recording import read_recording
from allocscope.model import Advice, AdviceKind, Trial
from tests.advice import over_folder, truth
from tests.allocator.made import SHIPPED
from tests.replay.cases import read_cases
from tests.simulator.recorded import HERE

DIED = SHIPPED / "curriculum-2-2200.run.json"
STEADY = SHIPPED / "steady-1-2216.run.json"


@pytest.mark.parametrize(
    ("path", "died", "kind", "conf"),
    [(DIED, True, AdviceKind.SETTING, "expandable_segments:True"), (STEADY, False, AdviceKind.NO_CHANGE, None)],
    ids=["died of holes", "steady near its limit"],
)
def test_advice_for_a_recorded_run_is_what_replays_show(path, died, kind, conf):
    judged = over_folder.judge(path)
    assert (judged.died, judged.advice.kind, judged.advice.conf) == (died, kind, conf)
    assert judged.advice.is_exact
    assert judged.wrong is None


@pytest.mark.parametrize("profile", ["leak_loss", "train-1", "mixed-2"])
def test_advice_for_a_case_is_what_the_real_allocator_shows(profile):
    for judged in truth.judge(read_cases(HERE / "truth")[profile]):
        assert judged.advice.is_exact
        assert judged.wrong is None


def test_advice_that_is_wrong_is_found_to_be():
    """Of a run that died: settings that do not help, help denied, nothing said. Of one that did not: help that is none."""
    run = read_recording(DIED)
    asked = over_folder.asked_of(run)
    nothing = Advice(AdviceKind.NOTHING, "")

    def wrong(advice, *, died=True):
        return over_folder.what_is_wrong(run, asked, advice, died=died)

    assert "fails" in (wrong(Advice(AdviceKind.SETTING, "", conf="roundup_power2_divisions:4")) or "")
    assert "it would be served with expandable_segments:True" in (wrong(nothing) or "")
    assert "the advice is unknown" in (wrong(replace(nothing, kind=AdviceKind.UNKNOWN)) or "")
    helps = Trial("expandable_segments:True", needed_bytes=run.device_total_bytes)
    setting = Advice(AdviceKind.SETTING, "", conf=helps.conf, trials=(helps,))
    assert wrong(setting) is None
    assert "a request fails in" in (
        wrong(replace(setting, trials=(replace(helps, needed_bytes=1 << 30),)), died=False) or ""
    )
