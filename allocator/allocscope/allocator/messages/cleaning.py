"""One line of a log: whose it is, and its text without what terminals, launchers and loggers put around it.

The text is left without white space, quotes and marks (`squeezed`), in lower case. So a line that was broken in the middle
of a word or a number joins its continuation as if it never had been.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|\x1b[@-Z\\^_]")
_ESCAPED = re.compile(r"(?<!\\)\\+(?:u([0-9A-Fa-f]{4})|([nrt]))")
_TAG = re.compile(r"<(/?)(?!std)([A-Za-z][A-Za-z0-9]{0,9})(?:\s[^<>]{0,300})?/?>")
_BREAKS = frozenset({"br", "p", "div", "li", "tr"})
_TRAILING = re.compile(r"(?<!\s)\s{2,}[\w.<>]{1,60}:\d+\s*$|\[repeated \d+x across cluster\].*$")
_JSON_TAIL = re.compile(r'\\?n?",\s*"(?:stream|time|level|timestamp|attrs)":.{0,400}$')
_JSON_RANK = re.compile(r'"(?:global_)?rank"\s*:\s*"?(\d{1,5})')
_RANK_INSIDE = re.compile(r"\brank[=:_ ]?(\d{1,5})")

_LONG_REFERENCE = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9A-Fa-f]{8,});?")
"""To no character; Python would make a number of it, and refuses numbers of more than 4,300 digits."""

_MARKS = "`*\"'|\\│┃║▏╎\u200b\u200c\u200d\u2060\ufeff\u00ad\x00"
_DELETED = dict.fromkeys(map(ord, _MARKS))

_PREFIX = re.compile(
    "|".join(
        (
            r"\s+",
            r"(?:>\s?)+",
            r"[│┃║|▏]\s?",
            r"E(?=\s{2,})",
            r"\[?[Rr]ank[ _:=]?(?P<rank_a>\d{1,5})\]?(?=[\s:,\[(]|$):?",
            r"\[\d{1,3},(?P<rank_b>\d{1,5})\](?:<std(?:err|out)>)?:",
            r"\[[a-z_]{1,20}(?P<rank_c>\d{1,5})\]:",
            r"\[(?P<rank_d>\d{1,5})\]:(?=\s)",
            r"(?P<rank_e>\d{1,5}):(?=\s)",
            r"\((?P<worker_a>[^()\n]{0,60}\bpid=\d+[^()\n]{0,60})\):?",
            r"(?P<worker_b>[\w.-]{1,60}:\d+:\d+) \[(?P<device>\d{1,3})\]",
            r"\[(?P<worker_e>(?:PID|pid)[:= ]{1,2}\d+)\]",
            r"\[pod/(?P<worker_c>[^\]\s]{1,100})\]",
            (
                r"\[?\d{4}[-/]\d\d[-/]\d\d[T _-]?\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
                r"(?:\s(?P<worker_d>[A-Z]{2}\d+(?:\s[A-Z]{2}\d+){0,3}))?\]?[:,|]?(?=\s|$|[\[(])"
            ),
            r"\[?(?:\d\d-\d\d |[A-Z][a-z]{2} [ \d]\d )?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?(?=\s|$)",
            r"\[?(?:ERROR|WARNING|WARN|INFO|DEBUG|CRITICAL|FATAL|TRACE)\]?(?=[\s:|]):?",
            r"std(?:err|out) [FP](?=\s)",
            r"<?std(?:err|out)>?:(?=\s)",
            r"\[[WEIF]\d{3,4} [\d:.]{4,30} [^\]\n]{1,80}\]",
            r"[WEIF]\d{4} [\d:.]{4,30}\s+\d+ [\w./-]{1,60}:\d+\]",
            r"\[?[\w./-]{1,80}\.(?:py|cpp|cc|cu|ts|h|hpp):\d+\]?:?(?=\s)",
            r"[\w.-]{1,60}\s+\|(?=\s)",
            r"[-+](?=\s)",
            r"\{\s*\"(?:log|message|msg)\"\s*:\s*\"",
            r"\[[A-Za-z][\w .:/@#-]{0,40}\]:?(?=\s)",
        )
    )
)
_MAX_PREFIXES = 16


@dataclass(frozen=True, slots=True)
class Source:
    """Who wrote a line, as far as its prefix says."""

    rank: int | None = None
    """The innermost of its ranks: launchers put their own before the job's."""
    worker: str | None = None
    outer: int | None = None
    """The outermost rank, where there are two."""

    def without_inner(self) -> Source:
        """What is left of it where only the launcher's prefix is there, as before a continuation."""
        return self if self.outer is None else Source(self.outer, self.worker)


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its dress."""

    source: Source | None
    """None: it does not say."""
    device: int | None
    squeezed: str


def squeeze(text: str) -> str:
    """The text without white space, quotes and marks, in lower case."""
    return "".join(text.split()).translate(_DELETED).lower()


def plain_lines(raw: str) -> list[str]:
    """A line of a log as the lines that it was before it was put into JSON or HTML; without colours."""
    if "\x1b" in raw:
        raw = _ANSI.sub("", raw)
    if raw.lstrip().startswith("{"):
        raw = _JSON_TAIL.sub("", raw)
    for _ in range(2):
        if "&" in raw:
            raw = html.unescape(_LONG_REFERENCE.sub("", raw))
    if "<" in raw:
        raw = _TAG.sub(lambda tag: "\n" if tag[2].lower() in _BREAKS else "", raw)
    if "\\" in raw:
        raw = _ESCAPED.sub(lambda e: chr(int(e[1], 16)) if e[1] else ("\n" if e[2] != "t" else " "), raw)
    return re.split(r"[\r\n\x0b\x0c\u2028\u2029]+", raw)


def undress(text: str) -> Line:
    """Whose line it is, and what it says."""
    at, rank, outer, worker, device = 0, None, None, None, None
    for _ in range(_MAX_PREFIXES):
        found = _PREFIX.match(text, at)
        if found is None or found.end() == at:
            break
        at = found.end()
        name = found.lastgroup
        if name is None:
            continue
        if name.startswith("rank"):
            outer, rank = (outer if outer is not None else rank), int(found[name])
        elif name == "device":
            worker, device = found["worker_b"], int(found["device"])
        else:
            worker = "".join(c if c.isprintable() else "?" for c in " ".join(found[name].split()))
            inside = _RANK_INSIDE.search(worker)
            rank = int(inside[1]) if inside else rank
    if rank is None and text.startswith("{"):
        inside = _JSON_RANK.search(text)
        rank = int(inside[1]) if inside else None
    source = None if rank is None and worker is None else Source(rank, worker, outer)
    rest = _TRAILING.sub("", text[at:]) if len(text) < 4096 else text[at:]
    return Line(source, device, squeeze(rest))
