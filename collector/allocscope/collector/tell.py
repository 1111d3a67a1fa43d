"""Who is told of alerts: one notifier for each Alertmanager and webhook, observed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from allocscope.alerts.notify import Channel, Notifier
from allocscope.alerts.notify_alertmanager import Alertmanager
from allocscope.alerts.notify_webhook import Webhook
from allocscope.alerts.states import Alert
from allocscope.collector.config import CollectorSettings
from allocscope.collector.observation import Observation


class _Observer:
    """What notifiers tell, as metrics."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def delivered(self, channel: str, count: int, duration_s: float) -> None:
        self._observation.notify.took(duration_s)
        self._observation.notifications.labels(channel, "sent").inc(count)

    def failed(self, channel: str, count: int, reason: str, duration_s: float, *, again: bool) -> None:
        self._observation.notify.failed()
        self._observation.notifications.labels(channel, "retried" if again else "given_up").inc(count)

    def dropped(self, channel: str, count: int, reason: str) -> None:
        self._observation.notifications.labels(channel, "given_up").inc(count)
        self._observation.dropped.labels("notifications", reason).inc(count)


class Notifiers:
    """All of them."""

    def __init__(self, notifiers: Sequence[Notifier]) -> None:
        self._notifiers = notifiers

    def start(self) -> None:
        """Begin to tell."""
        for notifier in self._notifiers:
            notifier.start()

    def publish(self, alerts: Iterable[Alert]) -> None:
        """Returns at once."""
        told = list(alerts)
        for notifier in self._notifiers:
            notifier.publish(told)

    def close(self, timeout_s: float) -> None:
        """Each tries once more; together for no longer than that."""
        over_s = time.monotonic() + timeout_s
        for notifier in self._notifiers:
            notifier.close(max(over_s - time.monotonic(), 0.0))


def notifiers(settings: CollectorSettings, observation: Observation, *, page_address: str) -> Notifiers:
    """As the settings name them. AddressError: one cannot be an address."""
    runbook_address = settings.runbook_address
    channels: list[Channel] = [
        Alertmanager(address, page_address=page_address, runbook_address=runbook_address)
        for address in settings.alertmanager
    ]
    channels += [Webhook(address, runbook_address=runbook_address) for address in settings.webhook]
    observer = _Observer(observation)
    return Notifiers([Notifier(channel, observer=observer) for channel in channels])
