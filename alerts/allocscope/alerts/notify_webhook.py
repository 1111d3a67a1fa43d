"""Telling any HTTP service: one POST of JSON for each change of an alert.

    POST <address>
    Content-Type: application/json
    Idempotency-Key: 5f0c…          the same for each try of one change; also `id`

    {
      "version": 1,
      "id": "5f0c…",                the same after a restart of the collector, too
      "state": "firing",            or "resolved"
      "name": "AllocscopeFragmentationOOMRisk",
      "severity": "critical",       or "warning", "info"
      "cause": "fragmentation",     or null
      "at_us": 1700000000000000,    when it began to fire, unix microseconds by the collector's clock
      "resolved_us": null,          when it resolved
      "labels": {"alertname": …, "severity": …, "cause": …, "incident": …, "job": …,
                 "node": …, "rank": …, "gpu": …, "uuid": …},      where to look first, of an alert about a job
      "summary": "…", "description": "…", "runbook_url": "…",
      "advice": null                what would help, from a replay of the job's own requests, once that is known
    }

An alert that fires is told once more, under an id of its own, when advice comes for the first time.
A collector that was restarted tells anew what fires and what resolved in its last minute, under the ids that these had.
Labels that are not known are absent. Any 2xx answer means taken; 429 and 5xx are tried again, honouring Retry-After; any
other is not. Only the latest state is told: of an alert that came and went while the receiver was away, its resolution.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from allocscope.alerts.notify import Notice
from allocscope.alerts.notify_http import TIMEOUT_S, Poster, checked, shown

VERSION = 1


class Webhook:
    """A channel: one address."""

    batch = 1
    refresh_s = None
    lingers = False

    def __init__(self, address: str, *, runbook_address: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """`runbook_address`: what to put before a runbook's path."""
        url = checked(address)
        self.name = f"webhook {shown(url)}"
        self._runbook_address = runbook_address
        self._poster = Poster(url, timeout_s=timeout_s)

    def send(self, notices: Sequence[Notice]) -> None:
        """One POST each."""
        for notice in notices:
            content = self._content(notice)
            self._poster.post(content, {"Idempotency-Key": str(content["id"])})

    def _content(self, notice: Notice) -> dict[str, object]:
        condition = notice.alert.condition
        rule = condition.rule
        return {
            "version": VERSION,
            "id": _id(notice),
            "state": "firing" if notice.firing else "resolved",
            "name": rule.name,
            "severity": rule.severity.value,
            "cause": rule.cause.value if rule.cause else None,
            "at_us": notice.at_us,
            "resolved_us": notice.resolved_us,
            "labels": {**condition.place, **condition.labels},
            "summary": condition.summary,
            "description": condition.description_with_advice,
            "runbook_url": rule.runbook_url_at(self._runbook_address),
            "advice": condition.advice,
        }

    def close(self) -> None:
        """Let go of connections."""
        self._poster.close()


def _id(notice: Notice) -> str:
    """The same for the same change, whatever its words are by now, and whoever tells it; that there is advice is a change."""
    advised = ["advised"] if notice.firing and notice.alert.condition.advice else []
    change = json.dumps([notice.key, notice.alert.fired_us, notice.alert.resolved_us, *advised])
    return hashlib.sha256(change.encode()).hexdigest()[:32]
