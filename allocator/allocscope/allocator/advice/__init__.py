"""What would help a job, judged by replaying its own requests.

Its business: which settings, and which changes to the program, are worth a try for a history; which of them must not be tried
(hazards); and what to recommend of what the replays show, in words with figures.

Not its business: how a replay is made (`allocscope.allocator.simulator`), when, where, or in how many processes: a caller may
give `advise` a way to make several attempts at once, and a clock.

    advice = advise(source, circumstances=Circumstances(uses_ipc=False))

One attempt by itself, settings with a change to the program or without: `outcome_of(script, Attempt(conf, "buckets:8"))`.
`gains_of` and `costs_of` say in phrases what a trial comes to beside the one that was recorded.
"""

from allocscope.allocator.advice.advise import advise
from allocscope.allocator.advice.attempt import Attempt, Replay, one_by_one, outcome_of
from allocscope.allocator.advice.changes import CHANGES, changed, check_change
from allocscope.allocator.advice.circumstances import Circumstances
from allocscope.allocator.advice.hazards import hazards_of
from allocscope.allocator.advice.words import costs_of, gains_of

__all__ = [
    "CHANGES",
    "Attempt",
    "Circumstances",
    "Replay",
    "advise",
    "changed",
    "check_change",
    "costs_of",
    "gains_of",
    "hazards_of",
    "one_by_one",
    "outcome_of",
]
