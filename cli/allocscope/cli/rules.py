"""`allocscope rules`: the alert rules for those who run Prometheus, to be written to where it reads them."""

from __future__ import annotations

import argparse
import os
import re

from allocscope.alerts.prometheus.documents import prometheus_rule, rule_file
from allocscope.alerts.prometheus.shipped import headed

HELP = "the alert rules for Prometheus, or for its operator"

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Of a Kubernetes object (RFC 1123, a subdomain)."""


def main(arguments: list[str]) -> int:
    """Print them."""
    parser = argparse.ArgumentParser(
        prog="allocscope rules",
        description=HELP,
        epilog="example: allocscope rules --operator --label release=prometheus",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--runbook-address",
        type=_address,
        default=os.environ.get("ALLOCSCOPE_RUNBOOK_ADDRESS"),
        metavar="URL",
        help="where people read the repository's files, put before docs/runbook/NAME.md (default: $ALLOCSCOPE_RUNBOOK_ADDRESS,"
        " or nothing: alerts then link to the page's path alone)",
    )
    parser.add_argument("--operator", action="store_true", help="as a PrometheusRule (monitoring.coreos.com/v1)")
    parser.add_argument("--name", type=_name, metavar="NAME", help="of the PrometheusRule (default: allocscope)")
    parser.add_argument(
        "--namespace", type=_name, metavar="NAME", help="of the PrometheusRule (default: none is named)"
    )
    parser.add_argument(
        "--label",
        type=_label,
        action="append",
        metavar="NAME=VALUE",
        help="of the PrometheusRule, by which your Prometheus selects its rules; may be given several times",
    )
    options = parser.parse_args(arguments)
    if not options.operator:
        if options.name or options.namespace or options.label:
            parser.error("--name, --namespace and --label are a PrometheusRule's: add --operator")
        document = rule_file(runbook_address=options.runbook_address)
    else:
        document = prometheus_rule(
            name=options.name or "allocscope",
            namespace=options.namespace,
            labels=dict(options.label or ()),
            runbook_address=options.runbook_address,
        )
    print(headed(document), end="")
    return 0


def _address(text: str) -> str:
    if re.fullmatch(r"https?://[^\s]+", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no address; it must begin with http:// or https://")


def _name(text: str) -> str:
    if _NAME.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no name in Kubernetes: small letters, digits, '-' and '.'")


def _label(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if name and given:
        return name, value
    raise argparse.ArgumentTypeError(f"{text!r} is no label; it must be NAME=VALUE")
