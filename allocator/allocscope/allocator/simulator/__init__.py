"""An exact simulator of PyTorch's caching allocator, 2.11 to 2.14, without PyTorch and without a device.

Its business: for each request what the real allocator would do, to the byte: addresses, counters, history, blocks, and the
text of an OutOfMemoryError. All of it is a function of the requests, the settings, the version, and a model of the device.

Not its business: time, other processes (they are a number that the caller sets), kernels.

`Simulator` serves requests; `Device` is the memory there is; `replay` turns recorded requests into answers.
"""

from allocscope.allocator.simulator.device import Device, LowestGap, Rising
from allocscope.allocator.simulator.simulator import Simulator

__all__ = ["Device", "LowestGap", "Rising", "Simulator"]
