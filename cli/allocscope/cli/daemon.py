"""`allocscope daemon`: the service that gathers from the jobs of its node; one a node."""

from __future__ import annotations

import asyncio
import sys

from allocscope.cli.service_log import lasting_log

HELP = "the service that gathers from the jobs of its node; one a node"


def main(arguments: list[str]) -> int:
    """Run until SIGTERM or SIGINT; 1: it could not start, 2: its settings are wrong."""
    with lasting_log():
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    # structlog imports rich where it is there, for tracebacks in colour: half of a daemon's start, and 5 MiB on every node.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    from allocscope.cli.settings import UnusableError, read_settings
    from allocscope.daemon.app import serve, set_up_log
    from allocscope.daemon.config import DaemonSettings
    from allocscope.daemon.errors import DaemonError

    try:
        settings = read_settings(DaemonSettings, arguments, command="daemon", about=HELP)
        set_up_log(settings)
        asyncio.run(serve(settings))
    except UnusableError as error:
        print(f"allocscope daemon: {error}", file=sys.stderr)
        return 2
    except DaemonError as error:
        print(f"allocscope daemon: {error}", file=sys.stderr)
        return 1
    return 0
