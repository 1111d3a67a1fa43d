"""Who takes more of the daemon's time than is his waits until it has come back, and nobody else does."""

from __future__ import annotations

import pytest

from allocscope.daemon import door
from allocscope.daemon.allowance import Allowance
from allocscope.daemon.door import Door
from allocscope.daemon.peers import Peer


def test_what_is_taken_comes_back_at_its_rate_and_no_more_than_there_was():
    now = [100.0]
    allowance = Allowance(0.25, 2.0, lambda: now[0])
    assert allowance.spend(2.0) == 0
    assert allowance.spend(0.5) == 2.0
    now[0] = 102.0
    assert allowance.spend(0.0) == 0
    now[0] = 1000.0
    assert allowance.spend(2.0) == 0
    assert allowance.spend(0.25) == 1.0


def test_a_user_who_takes_too_much_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(door, "MOST_CONNECTIONS", 2)
    inside = Door()
    assert inside.spend(Peer(1, 1), 6.0) == pytest.approx(2.0, abs=0.5)
    assert inside.spend(Peer(2, 2), 4.0) == 0
    assert inside.spend(Peer(3, 3), 4.0) == 0
    assert inside.spend(Peer(2, 2), 2.0) == pytest.approx(2.0, abs=0.5)
