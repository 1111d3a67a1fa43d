"""Where samples, block maps, captures and alerts are kept: the Repository and its backends.

Its business: the promises every backend keeps (exactly once, whole, ordered, bounded; `repository`), migrations,
retention and roll-ups. `sql.open_repository(url)` opens one.

Not its business: what the figures mean. No backend computes a bill or a forecast, or reads a clock.
"""
