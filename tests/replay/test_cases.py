"""What PyTorch 2.14.1 did with the same requests under other settings is what a replay of its history under those says."""

import pytest

from allocscope.allocator.simulator.what_if import what_if
from tests.replay.cases import read_cases
from tests.replay.pairs import pairs_of
from tests.simulator.recorded import FOLDERS

PROFILES = {profile: cases for folder in FOLDERS for profile, cases in read_cases(folder / "truth").items()}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_history_replayed_under_its_own_settings_is_what_happened(profile):
    for case in PROFILES[profile]:
        found = what_if(case.source, [])
        assert list(found.exactness.differences()) == []
        assert found.outcomes[0][1].num_alloc_retries == case.stats["num_alloc_retries"]
        assert found.outcomes[0][1].reserved_peak_bytes == case.stats["reserved_bytes.all.peak"]


@pytest.mark.parametrize("profile", [p for p, cases in PROFILES.items() if cases[0].streams == 1 and len(cases) > 1])
def test_a_history_replayed_under_others_is_what_happened_under_those(profile):
    """Of one stream: with several, what waits for which how long is only known as far as the history shows it."""
    pairs = list(pairs_of(PROFILES[profile]))
    assert len(pairs) >= 2
    assert [pair for pair in pairs if not pair.equal] == []
