"""What is foreseen of one allocator: from its samples, block maps and events, as they come, to a Forecast.

Pure: told the time, no clocks, no files, nothing random, numpy beside the standard library. `Outlooks` is the door, for as many allocators as there are;
`Outlook` the same for one.

How it thinks. An allocator runs out when a step's peak of live memory, and the holes that lie stranded beneath it, no longer
fit into what the others leave of the device: need against room. So it follows the need (peaks, troughs, stranded bytes) and
the room (what others take) over windows of time, and asks three questions:

- Does one of them keep moving toward the other, and when would they meet? (`trends`)
- Did the allocator lately touch the limit, and how narrowly did it come by? (`flushes`)
- What moved: live memory that nothing frees, what a step needs, holes, or another process? (`judgement`)

A full device is no sign of anything: a caching allocator reserves until it is full whether it is healthy or not.
"""

from allocscope.alerts.forecast.constants import Constants
from allocscope.alerts.forecast.outlooks import Foreseen, Outlook, Outlooks
from allocscope.alerts.forecast.samples import Figures, joined, of_chunk, of_chunks, of_samples

__all__ = ["Constants", "Figures", "Foreseen", "Outlook", "Outlooks", "joined", "of_chunk", "of_chunks", "of_samples"]
