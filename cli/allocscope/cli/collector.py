"""`allocscope collector`: the service that stores, foresees and alerts; one a fleet."""

from __future__ import annotations

import sys

from allocscope.alerts.notify import NotifyError
from allocscope.cli.settings import UnusableError, read_settings
from allocscope.collector.app import run
from allocscope.collector.config import CollectorSettings
from allocscope.collector.errors import CollectorError
from allocscope.storage.errors import CannotOpen

HELP = "the service that stores, foresees and alerts; one a fleet"


def main(arguments: list[str]) -> int:
    """Run until SIGTERM or SIGINT; 1: it could not start, 2: its settings are wrong."""
    try:
        run(read_settings(CollectorSettings, arguments, command="collector", about=HELP))
    except UnusableError as error:
        print(f"allocscope collector: {error}", file=sys.stderr)
        return 2
    except (CollectorError, CannotOpen, NotifyError) as error:
        print(f"allocscope collector: {error}", file=sys.stderr)
        return 1
    return 0
