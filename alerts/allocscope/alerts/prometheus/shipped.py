"""The files that are shipped, made with nothing but defaults."""

from __future__ import annotations

from allocscope.alerts.prometheus.documents import prometheus_rule, rule_file
from allocscope.alerts.prometheus.yaml_text import Document, written

RULES_FILE = "allocscope.rules.yml"
"""For `rule_files`."""
OPERATOR_FILE = "allocscope.prometheusrule.yml"
"""For prometheus-operator."""
FILES = {RULES_FILE: rule_file, OPERATOR_FILE: prometheus_rule}

_HEAD = """\
# Alerts of Allocscope, made by `allocscope rules` from the table that its collector judges by: do not edit, make them anew.
# Scrape collectors and daemons with honor_labels: true (in a ServiceMonitor honorLabels: true): `job` is the training job's.
# Needs Prometheus 2.42 or newer (keep_firing_for).
"""


def text(name: str) -> str:
    """One of FILES, whole."""
    return headed(FILES[name]())


def headed(document: Document) -> str:
    """Any of these documents, as a file."""
    return _HEAD + written(document)
