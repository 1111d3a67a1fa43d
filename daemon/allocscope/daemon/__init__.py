"""One process a node: takes what probes send, adds what NVML knows, and sends it on.

Its business: who is who among the processes on a device, what the driver says, and keeping on
disk, bounded, what the collector has not acknowledged.

Not its business: forecasts and alerts, which need the history that only the collector has.
"""
