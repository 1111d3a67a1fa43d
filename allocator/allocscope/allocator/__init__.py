"""What is known about PyTorch's caching allocator, as pure functions over values.

Its business: reading snapshots of every PyTorch version safely, the bill, headroom, the
simulator and replay, what a setting would change, and the texts of out-of-memory errors.

Not its business: where a snapshot came from and where an answer goes. Nothing here opens a
socket, asks the time or imports torch; only `recording` reads files.
"""
