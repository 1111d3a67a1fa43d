"""What runs inside a training or serving job and tells the node's daemon what its allocators hold.

    from allocscope import probe
    probe.start()

Its business: counters each second, a block map now and then, what there is at an out-of-memory
error, all at next to no cost.

Not its business: judging what it sees. It needs the standard library and protobuf; torch is
looked up, never required, and grpcio is not loaded into the job (`allocscope.probe.call` says
why). It never initialises CUDA, never raises into the job and never blocks it.
"""

from allocscope.probe.app import start, stop
from allocscope.probe.tensors import tensors

__all__ = ["start", "stop", "tensors"]
