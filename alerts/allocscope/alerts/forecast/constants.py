"""The few numbers that the forecast goes by, and what each means. `fit` finds them from recorded runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """All of them. Parts are of the device's memory, times in seconds."""

    warmup_s: float = 100.0
    """Before that there is nothing to say: everything grows at first."""

    critical_horizon_s: float = 200.0
    """Need and room are going to meet within so long. The longer it is, the more of what grows, but stops in time, is critical
    meanwhile: docs/FORESIGHT.md has the figures."""
    critical_holes_horizon_s: float = 400.0
    """The same where more lies stranded than is left, or by what flushes leave: holes end a job long before need and room meet."""
    at_risk_horizon_s: float = 900.0
    watch_horizon_s: float = 3600.0

    critical_slack: float = 0.005
    """The narrowest flush of late left less than this part. It is critical only where flushes left less and less: a job whose
    steps are all alike comes as near to the limit as it ever will with the first, and stays there. Anything looser (two
    flushes, 2 %) was wrong three times for once right, over replays of runs of varying sizes on devices just large enough."""
    at_risk_slack: float = 0.02
    watch_slack: float = 0.05
    narrowing_flushes: int = 3
    """So many, each narrower than the one before …"""
    narrowing_steps: float = 1.0
    """… and so many more steps like the last would take more than what is left."""
    falling_flushes: int = 3
    """So many flushes that left less than any before are a trend of their own …"""
    burst_s: float = 20.0
    """… where those of one such stretch, as of one step, count as one."""
    flushes_s: float = 600.0
    """So long a flush counts."""

    calm: float = 0.05
    """A margin of more than this part ends a critical state that no trend holds up any more …"""
    calm_for_s: float = 120.0
    """… once it has lasted so long."""

    move: float = 0.001
    """A record counts where it goes beyond the last by so much."""
    records: int = 4
    """So many make a trend."""
    swings: int = 6
    """With fewer steps than that, several windows may have broken records in one and the same step …"""
    few_swings_records: int = 8
    """… so that more of them are asked for; what climbs without steps, as a server's cache does, has them."""
    recent_windows: int = 5
    """The latest record must be of these, else it has stopped growing."""

    rising_share: float = 0.95
    """Of a leak's troughs such a part lies higher than the one before; so do the counts of live blocks …"""
    unevenness: float = 0.45
    """… and their rises are all about alike: the standard deviation is at most this part of the mean."""
    sparse_s: float = 2.0
    """Where samples are further apart than that, a window's trough may be missed …"""
    smoothing_windows: int = 3
    """… and the lowest of so many is looked at."""
    lifts: float = 0.025
    """A leak matters by itself where it takes this part before the critical horizon."""
    leak_share: float = 0.5
    """Troughs that rise at least by this part of what the peaks rise by make it a leak, not growth."""
    stranded_windows: int = 10
    """What lies stranded at peaks is looked up in so many windows."""

    room_move: float = 0.002
    """A loss of room counts where it is more than this part."""
    room_losses: int = 3
    """The first may be another process's arrival."""
    room_moves: int = 4
    """So many notes of the room with a loss, or with a stall after one because nothing was free: that is no stop."""
    room_gap_s: float = 120.0
    """Losses further apart than that are not of one growth."""
    room_recent_s: float = 40.0
    """The latest loss is no older, or no older than twice the time between losses."""
    used_up: float = 0.02
    """Less than this part of the device free is as good as nothing."""
