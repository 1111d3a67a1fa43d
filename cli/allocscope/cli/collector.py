"""`allocscope collector`: the service that stores, foresees and alerts; one a fleet."""

from __future__ import annotations

import sys

from allocscope.cli.service_log import lasting_log
from allocscope.cli.settings import UnusableError, read_settings
from allocscope.collector.config import CollectorSettings

HELP = "the service that stores, foresees and alerts; one a fleet"


def main(arguments: list[str]) -> int:
    """Run until SIGTERM or SIGINT; 1: it could not start, 2: its settings are wrong."""
    with lasting_log():
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    try:
        settings = read_settings(CollectorSettings, arguments, command="collector", about=HELP)
    except UnusableError as error:
        return _complain(error, 2)

    # Only now: what a collector imports takes a second.
    from allocscope.alerts.notify import NotifyError
    from allocscope.collector.app import run
    from allocscope.collector.errors import CollectorError
    from allocscope.storage.errors import StorageError

    try:
        run(settings)
    except (CollectorError, StorageError, NotifyError) as error:
        return _complain(error, 1)
    return 0


def _complain(error: Exception, status: int) -> int:
    print(f"allocscope collector: {error}", file=sys.stderr)
    return status
