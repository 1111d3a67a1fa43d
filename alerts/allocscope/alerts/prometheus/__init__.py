"""The alert rules for those who run Prometheus: the table that the collector judges by, as a rule file and as a PrometheusRule.

Its business: expressions over our metrics that come to the collector's verdicts, the same names, severities, times and words,
and the two shipped files, which `./dev rules` makes (`python -m allocscope.alerts.prometheus`) and `allocscope rules` prints.

Not its business: judging allocators. A forecast needs block maps and a history of minutes, so the collector makes it;
the rules here go by what it exposes of it.
"""
