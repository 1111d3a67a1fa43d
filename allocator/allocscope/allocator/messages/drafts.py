"""Figures and phrases in squeezed text (see `cleaning`), and the messages that they make up.

A message begins at a phrase that nothing but an out-of-memory has; its clauses follow each other with little between them. So
what a cut message lost stays unknown, and is not taken from the next. A clause far from any message, or one that the message
already has, begins a message whose head is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from allocscope.allocator.messages.figures import Figure, read_figure
from allocscope.allocator.messages.message import OomMessage, Origin, ProcessFigure
from allocscope.allocator.messages.phrases import (
    AFTER,
    AMOUNT,
    AMOUNT_BEFORE,
    BARE,
    DEVICE_BEFORE,
    HEADED,
    IN_BRACKETS,
    IN_BRACKETS_BEFORE,
    RETRY,
    TAILED,
    WEAK,
    phrases,
)

CLAUSE_GAP = 160
"""So many characters may stand between two clauses of a message: a prefix that is not known to be one."""
LOOSE_GAP = 600
"""So many between two phrases that tell of one failure of NCCL, of a library or of the driver."""
LONGEST_MESSAGE = 16384


@dataclass(slots=True)
class Draft:
    """A message as far as it has been read."""

    start: int
    end: int
    origin: Origin
    kind: str | None = None
    orphan: bool = False
    """Its head is lost."""
    bare: bool = False
    """It counts only where an error's name or the line's beginning says that it is one."""
    closed: bool = False
    over_limit: bool = False
    device: int | None = None
    figures: dict[str, Figure | None] = field(default_factory=dict)
    processes: list[ProcessFigure] = field(default_factory=list)
    recommends: str | None = None
    """What it recommends: `split` or the name of a variable."""
    expandable: bool | None = None

    @property
    def silent(self) -> bool:
        """Does it say nothing but that it is?"""
        return not (self.figures or self.processes or self.over_limit)

    def message(self, line: int, rank: int | None, worker: str | None, device: int | None) -> OomMessage:
        """The draft as a message, with what its line says of it."""
        return OomMessage(
            line=line,
            origin=self.origin,
            kind=self.kind,
            rank=rank,
            worker=worker,
            device=self.device if self.device is not None else device,
            other_processes=tuple(self.processes),
            over_limit=self.over_limit,
            expandable=self.expandable,
            conf_name=self.recommends if self.recommends != "split" else None,
            **self.figures,  # type: ignore[arg-type]  # the names are fields of OomMessage, each a figure
        )


def drafts(text: str, begins_line: Callable[[int], bool]) -> list[Draft]:
    """The messages in squeezed text, in order; `begins_line` says whether a line begins at an offset."""
    reader = _Reader(text)
    for found in phrases(text):
        reader.take(str(found.lastgroup), found)
    return [draft for at, draft in enumerate(reader.drafts) if _counts(text, reader.drafts, at, begins_line)]


def _counts(text: str, all_drafts: list[Draft], at: int, begins_line: Callable[[int], bool]) -> bool:
    draft = all_drafts[at]
    if draft.orphan:
        return len(draft.figures) + bool(draft.processes) >= 2
    if not (draft.bare and draft.silent):
        return True
    if draft.origin is Origin.ALLOCATOR and draft.kind is None:
        return False
    followed = at + 1 < len(all_drafts) and all_drafts[at + 1].start - draft.end < CLAUSE_GAP
    if followed and not all_drafts[at + 1].silent:
        return False
    before = text[max(draft.start - 10, 0) : draft.start]
    return begins_line(draft.start) or before.endswith(("error:", "exception:"))


class _Reader:
    """Takes phrase by phrase; the last draft is the one that clauses belong to."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.drafts: list[Draft] = []
        self._nccl_began: int | None = None

    def take(self, name: str, found: re.Match[str]) -> None:
        getattr(self, f"_{name}")(found)

    # --- where drafts begin ---------------------------------------------------------------------------------------------

    def _begin(self, found: re.Match[str], origin: Origin, kind: str | None = None) -> Draft:
        draft = Draft(found.start(), found.end(), origin, kind)
        self.drafts.append(draft)
        return draft

    def _open(self, at: int, gap: int = CLAUSE_GAP) -> Draft | None:
        """The draft that a clause at this offset belongs to."""
        draft = self.drafts[-1] if self.drafts else None
        if draft is None or draft.closed or at - draft.end > gap or at - draft.start > LONGEST_MESSAGE:
            return None
        return draft

    def _oom(self, found: re.Match[str]) -> None:
        kind = found[0].removesuffix("outofmemory").removesuffix("backend")
        self._begin(found, Origin.ALLOCATOR, kind).bare = True

    def _tried(self, found: re.Match[str]) -> None:
        draft = self._open(found.start())
        if (
            draft is None
            or draft.origin not in (Origin.ALLOCATOR, Origin.HOST)
            or "requested" in draft.figures
            or draft.orphan
        ):
            draft = self._begin(found, Origin.ALLOCATOR)
            draft.bare = True
        draft.end = found.end()
        if self._text.startswith("morethan1eb", found.end()):
            draft.over_limit = True
        self._read_after(draft, "requested", found.end())
        named = IN_BRACKETS.match(self._text, draft.end)
        if named and "requested" in draft.figures:
            self._name(draft, named)

    def _async_pool(self, found: re.Match[str]) -> None:
        draft = self._begin(found, Origin.ASYNC, "cuda")
        digits = re.search(r"\d+", found[0])
        draft.device = int(digits[0]) if digits else None
        draft.bare = not found[0].endswith("allowedmemory")

    def _policy(self, found: re.Match[str]) -> None:
        draft = self._open(found.start()) or self._begin(found, Origin.POLICY)
        draft.origin, draft.end, draft.bare = Origin.POLICY, found.end(), False

    def _singly(self, found: re.Match[str]) -> None:
        draft = self._begin(found, Origin.ALLOCATOR, "xpu")
        self._read_after(draft, "limit", found.end())

    def _retry(self, found: re.Match[str]) -> None:
        self.drafts.append(_retry_draft(RETRY.match(self._text, found.start())))

    def _nccl_head(self, found: re.Match[str]) -> None:
        self._nccl_began = found.start()

    def _nccl(self, found: re.Match[str]) -> None:
        draft = self._nccl_draft(found)
        if "requested" in draft.figures:
            draft = self._begin(found, Origin.NCCL)
        digits = re.search(r"\d+", found[0])
        draft.figures["requested"] = Figure.exact(int(digits[0])) if digits else None
        if "cudahost" in found[0]:
            draft.origin = Origin.HOST

    def _nccl_failure(self, found: re.Match[str]) -> None:
        self._nccl_draft(found)

    def _nccl_draft(self, found: re.Match[str]) -> Draft:
        draft = self._open(found.start(), LOOSE_GAP)
        if draft is None or draft.origin is not Origin.NCCL:
            draft = self._begin(found, Origin.NCCL)
            if self._nccl_began is not None and found.start() - self._nccl_began <= 2 * LOOSE_GAP:
                draft.start = self._nccl_began
            self._nccl_began = None
        draft.end = found.end()
        return draft

    def _driver(self, found: re.Match[str]) -> None:
        if self._nccl_began is not None and found.start() - self._nccl_began <= 2 * LOOSE_GAP:
            self._nccl_draft(found)
            return
        kind = next(
            (k for k in ("hip", "xpu") if found[0].startswith(k)), "xpu" if "out_of_device" in found[0] else "cuda"
        )
        self._loose(found, Origin.DRIVER, kind, also=(Origin.NCCL, Origin.LIBRARY))

    def _library(self, found: re.Match[str]) -> None:
        self._loose(found, Origin.LIBRARY, "cuda")

    def _masked(self, found: re.Match[str]) -> None:
        self._loose(found, Origin.MASKED, "cuda")

    def _assertion(self, found: re.Match[str]) -> None:
        self._loose(found, Origin.ASSERT)

    def _killed(self, found: re.Match[str]) -> None:
        self._loose(found, Origin.HOST, "cpu")

    def _loose(
        self, found: re.Match[str], origin: Origin, kind: str | None = None, also: tuple[Origin, ...] = ()
    ) -> None:
        """A phrase without figures: what tells of the same failure a little later is the same."""
        draft = self._open(found.start(), LOOSE_GAP)
        if draft is None or draft.origin not in (origin, *also):
            draft = self._begin(found, origin, kind)
        draft.end = found.end()

    def _cpu(self, found: re.Match[str]) -> None:
        self._begin(found, Origin.HOST, "cpu")

    def _array(self, found: re.Match[str]) -> None:
        self._read_after(self._begin(found, Origin.HOST, "cpu"), "requested", found.end())

    def _invalid(self, found: re.Match[str]) -> None:
        draft = self._begin(found, Origin.ALLOCATOR, "mps")
        draft.bare = draft.over_limit = True
        self._read_after(draft, "requested", found.end())

    # --- clauses --------------------------------------------------------------------------------------------------------

    def _headed(self, found: re.Match[str]) -> None:
        name, end = HEADED[found[0]], found.end()
        amount = AMOUNT.match(self._text, end)
        if amount:
            self._clause(found[0], name, read_figure(amount[1], amount[2]), found.start(), amount.end())
        elif found[0] == "requestedsize:" and (bare := BARE.match(self._text, end)):
            self._clause(found[0], name, Figure.exact(int(bare[1])), found.start(), bare.end())
        elif draft := self._open(found.start()):
            draft.end = end

    def _tailed(self, found: re.Match[str]) -> None:
        if found[0] in AFTER and self._text[found.end() : found.end() + 1].isalpha():
            return
        amount = AMOUNT_BEFORE.search(self._text, max(found.start() - 40, 0), found.start())
        if amount is None or self._text[amount.start() - 1] not in AFTER.get(found[0], self._text[amount.start() - 1]):
            return
        is_cut = found[0].startswith("is") and not self._text.startswith("bypytorch", found.end())
        figure = read_figure(amount[1], amount[2])
        draft = self._clause("is" if is_cut else found[0], TAILED[found[0]], figure, amount.start(), found.end())
        named = IN_BRACKETS_BEFORE.search(self._text, max(amount.start() - 16, 0), amount.start())
        if draft and named:
            self._name(draft, named)

    def _process(self, found: re.Match[str]) -> None:
        amount = AMOUNT.match(self._text, found.end())
        draft = self._open(found.start())
        if amount is None:
            return
        if draft is None or draft.origin is not Origin.ALLOCATOR:
            draft = self._begin(found, Origin.ALLOCATOR)
            draft.orphan = True
        pid = int(found[0][len("process") : -len("has")])
        draft.processes.append(ProcessFigure(pid, read_figure(amount[1], amount[2])))
        draft.end = amount.end()

    def _device(self, found: re.Match[str]) -> None:
        draft = self._open(found.start())
        if draft is None:
            return
        draft.end = found.end()
        named = DEVICE_BEFORE.search(self._text, max(found.start() - 12, 0), found.start())
        if named and draft.device is None:
            draft.device = int(named[1])

    def _clause(self, phrase: str, name: str, figure: Figure | None, start: int, end: int) -> Draft | None:
        draft = self._open(start)
        if draft is not None and draft.origin in (Origin.ALLOCATOR, Origin.ASYNC, Origin.POLICY):
            known = draft.figures.get(name)
            if name not in draft.figures or known == figure:
                draft.figures[name], draft.end = figure, end
                return draft
        if phrase in WEAK:
            return None
        draft = Draft(start, end, Origin.ALLOCATOR, orphan=True, figures={name: figure})
        self.drafts.append(draft)
        return draft

    def _split(self, found: re.Match[str]) -> None:
        if draft := self._open(found.start(), LOOSE_GAP):
            draft.recommends, draft.end = draft.recommends or "split", found.end()

    def _conf(self, found: re.Match[str]) -> None:
        if draft := self._open(found.start(), LOOSE_GAP):
            draft.recommends, draft.end, draft.expandable = found[0].partition("=")[0].upper(), found.end(), False

    def _manual(self, found: re.Match[str]) -> None:
        """The last words of a message; from PyTorch 2.14 on nothing is recommended where expandable segments are on."""
        if draft := self._open(found.start(), LOOSE_GAP):
            draft.end, draft.closed = found.end(), True
            if draft.recommends is None and "unallocated" in draft.figures:
                draft.expandable = True

    def _read_after(self, draft: Draft, name: str, at: int) -> None:
        amount = AMOUNT.match(self._text, at)
        if amount:
            draft.figures[name], draft.end = read_figure(amount[1], amount[2]), amount.end()

    def _name(self, draft: Draft, named: re.Match[str]) -> None:
        draft.kind = draft.kind or (named[1] if named[1] not in ("gpu", "device") else None)
        if draft.device is None and named[2]:
            draft.device = int(named[2])


def _retry_draft(found: re.Match[str] | None) -> Draft:
    """A warning of PyTorch 2.13 on, complete as it stands."""
    assert found is not None
    device, asked, free, total = found.groups()
    figures = {name: Figure.exact(int(n)) for name, n in (("requested", asked), ("free", free), ("total", total)) if n}
    return Draft(
        found.start(),
        found.end(),
        Origin.RETRY,
        "cuda",
        closed=True,
        device=int(device) if device else None,
        figures=figures,
    )


def retry_alone(squeezed: str) -> Draft | None:
    """The one warning that a line is, whole; None where it is anything else."""
    at = squeezed.find("memoryallocationfailedwithoom")
    if at < 0 or not squeezed.endswith(").") or len(squeezed) > 400:
        return None
    found = RETRY.match(squeezed, at)
    return _retry_draft(found) if found and found.end() >= len(squeezed) - 1 else None
