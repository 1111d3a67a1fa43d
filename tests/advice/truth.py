"""Advice held against what PyTorch's real allocator did with the same requests under several settings (tests/replay/cases.py).

Of a case advice is right when, of the cases of the same profile and memory fraction,

- the one with the settings that are advised got further than this one's failure, and failed nowhere if nothing failed here;
- none did, where nothing is said to help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allocscope.allocator.advice import advise
from allocscope.allocator.settings import parse_settings
from allocscope.model import Advice, AdviceKind
from tests.replay.cases import Case


@dataclass(frozen=True)
class Judged:
    """A case, what was advised, which real case bears that out, and what of it is wrong."""

    name: str
    died: bool
    advice: Advice
    borne_out_by: str | None
    wrong: str | None


def judge(cases: Sequence[Case]) -> list[Judged]:
    """All cases of one profile."""
    return [_judged(case, [each for each in cases if _limit(each) == _limit(case)]) for case in cases]


def _judged(case: Case, alike: Sequence[Case]) -> Judged:
    advice = advise(case.source)
    served, by, wrong = _served(case), None, None
    if advice.kind is AdviceKind.SETTING and advice.conf is not None:
        advised = parse_settings(advice.conf)
        by = next((each for each in alike if each.source.settings == advised), None)
        if by is not None and not _gets_further(by, served):
            wrong = f"{by.name} failed after {_served(by):,} allocations"
    elif advice.kind is AdviceKind.UNKNOWN:
        wrong = "it says nothing"
    elif served is not None:
        helped = [each.name for each in alike if each is not case and _gets_further(each, served)]
        wrong = f"{', '.join(helped)} got further" if helped else None
    return Judged(case.name, served is not None, advice, None if by is None else by.name, wrong)


def _gets_further(case: Case, allocations: int | None) -> bool:
    own = _served(case)
    return own is None or (allocations is not None and own > allocations)


def _served(case: Case) -> int | None:
    """How many allocations were served before the one that failed; None: none failed."""
    actions = [entry.action for entry in case.source.trace]
    return actions[: actions.index("oom")].count("alloc") if "oom" in actions else None


def _limit(case: Case) -> float | None:
    return case.source.memory_fraction
