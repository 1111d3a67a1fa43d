"""Whether what was asked about is known at all: a name that is mistyped is told apart from one of which there is nothing to tell."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from allocscope.cli.ask import PAGE, Collector, Unanswered, piece, understood

MOST_NAMED = 10


def check_node(collector: Collector, node: str) -> None:
    """Unanswered: it never reported."""
    with understood(collector.url):
        names = [str(each["node"]) for each in collector.all("nodes", {"limit": PAGE})["items"]]
    if node not in names:
        raise Unanswered(f"no reports of node {node[:100]!r}; {_those(names, node)}", "unknown_node")


def check_job(collector: Collector, job: str) -> None:
    """Unanswered: it never reported, in the collector's words."""
    collector.get(f"jobs/{piece(job)}")


def check_rank(collector: Collector, job: str, rank: int) -> None:
    """Unanswered: the job has none such, as far as its processes are known."""
    with understood(collector.url):
        about = collector.get(f"jobs/{piece(job)}")
        processes = about["processes"]
        ranks = sorted({one["rank"] for one in processes if one["rank"] is not None})
        sizes = [one["world_size"] for one in processes if one["world_size"] is not None]
    if rank not in ranks and rank >= max(sizes, default=0):
        raise Unanswered(
            f"no process of job {job[:100]!r} is of rank {rank}; {_those(map(str, ranks))}", "unknown_rank"
        )


def _those(names: Iterable[str], near: str | None = None) -> str:
    """Those that are known, the ones that look alike before the others."""
    found = list(names)
    alike = get_close_matches(near, found, n=MOST_NAMED) if near else []
    shown = [*alike, *(one for one in found if one not in alike)][:MOST_NAMED]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    return f"known: {', '.join(shown)}{more}" if shown else "none is known yet"
