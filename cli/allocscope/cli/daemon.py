"""`allocscope daemon`: the service that gathers from the jobs of its node; one a node."""

from __future__ import annotations

import asyncio
import sys

from allocscope.cli.settings import UnusableError, read_settings
from allocscope.daemon.app import serve, set_up_log
from allocscope.daemon.config import DaemonSettings
from allocscope.daemon.errors import DaemonError

HELP = "the service that gathers from the jobs of its node; one a node"


def main(arguments: list[str]) -> int:
    """Run until SIGTERM or SIGINT."""
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
