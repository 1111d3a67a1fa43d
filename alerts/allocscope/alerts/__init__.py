"""Says before it happens which job will run out of memory, and why, and tells people once.

Its business: the forecast and the alert states (both pure, told the time), the rules shipped
for Prometheus with their runbook, and the notifiers.

Not its business: collecting and keeping samples; it is handed them.
"""
