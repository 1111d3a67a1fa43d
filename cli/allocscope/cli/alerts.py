"""`allocscope alerts`: what stands, what stood, and why."""

from __future__ import annotations

from collections.abc import Iterator

from allocscope.cli.ask import PAGE, Collector, Json, Row, answer, parser, read_name
from allocscope.cli.figures import moment
from allocscope.cli.known import check_job

HELP = "alerts, the latest first"


def main(arguments: list[str]) -> int:
    """Ask, and print."""
    asking = parser("alerts", HELP, "--job llama --state firing")
    asking.add_argument("--job", type=read_name, metavar="JOB", help="of this job alone (default: of all)")
    asking.add_argument(
        "--state", choices=("pending", "firing", "resolved"), help="in this state alone (default: in any)"
    )
    options = asking.parse_args(arguments)

    def known(collector: Collector) -> None:
        if options.job is not None:
            check_job(collector, options.job)

    return answer(options, "alerts", {"job": options.job, "state": options.state, "limit": PAGE}, _rows, known=known)


def _rows(got: Json) -> Iterator[Row]:
    yield "since (UTC)", "until", "severity", "state", "alert", "why"
    for alert in got["items"]:
        until = "" if alert["resolved_us"] is None else moment(alert["resolved_us"])
        since = moment(alert["at_us"])
        yield since, until, alert["severity"], alert["state"], alert["name"], alert["summary"]
