"""Where samples, block maps, captures and alerts are kept: the Repository and its backends.

Its business: the promises every backend keeps (exactly once, ordered, bounded), migrations,
retention and roll-ups.

Not its business: what the figures mean. No backend computes a bill or a forecast.
"""
