"""Telling an Alertmanager (API v2): it groups, routes, silences and tells people.

What fires is sent anew each minute and expires a few minutes later, so that it ends in Alertmanager also where we die; what
resolved is sent with its end. Alertmanager knows an alert by its labels, so that sending again changes nothing, and a job's
alert has its job's labels only: where to look first is an annotation. The rules shipped for Prometheus make the same labels,
so that an Alertmanager that both tell has one alert of them.
Several Alertmanagers of one cluster are each told, by a notifier each, as Prometheus does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from allocscope.alerts.notify import Notice
from allocscope.alerts.notify_http import TIMEOUT_S, Poster, checked, shown

REFRESH_S = 60.0
EXPIRES_AFTER_REFRESHES = 4
"""So that three lost refreshes in a row are borne."""
BATCH = 64
"""One delivery takes so many: 64 alerts are some 100 kB."""

_PATH = "/api/v2/alerts"


class Alertmanager:
    """A channel: one Alertmanager, at its base address."""

    batch = BATCH
    lingers = True
    """Of what is over before its group is first told of (group_wait, half a minute as a rule) Alertmanager tells nobody. An end
    that lies ahead would not do: of two such ends Alertmanager keeps the later, that of the last refresh."""

    def __init__(
        self,
        address: str,
        *,
        page_address: str | None = None,
        runbook_address: str | None = None,
        refresh_s: float = REFRESH_S,
        timeout_s: float = TIMEOUT_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`page_address`: where people reach our page; `runbook_address`: what to put before a runbook's path."""
        url = checked(address)
        path = url.path.rstrip("/")
        self.name = f"alertmanager {shown(url)}"
        self.refresh_s = refresh_s
        self._page_address, self._runbook_address = page_address, runbook_address
        self._wall_clock = wall_clock
        self._poster = Poster(url.copy_with(path=path if path.endswith(_PATH) else path + _PATH), timeout_s=timeout_s)

    def send(self, notices: Sequence[Notice]) -> None:
        """In one delivery."""
        expires_us = round((self._wall_clock() + EXPIRES_AFTER_REFRESHES * self.refresh_s) * 1e6)
        self._poster.post([self._alert(notice, expires_us) for notice in notices])

    def _alert(self, notice: Notice, expires_us: int) -> dict[str, object]:
        condition = notice.alert.condition
        return {
            "labels": condition.labels,
            "annotations": {
                "summary": condition.summary,
                "description": condition.description_with_advice,
                **({"advice": condition.advice} if condition.advice else {}),
                "runbook_url": condition.rule.runbook_url_at(self._runbook_address),
                **condition.place,
            },
            "startsAt": _rfc3339(notice.at_us),
            "endsAt": _rfc3339(expires_us if notice.resolved_us is None else notice.resolved_us),
            **({"generatorURL": self._page_address} if self._page_address else {}),
        }

    def close(self) -> None:
        """Let go of connections."""
        self._poster.close()


def _rfc3339(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="milliseconds")
