"""Out-of-memory texts: found in logs of any size, turned into bytes, and judged.

Its business: the texts of PyTorch 1.0 to 2.14 (CUDA, HIP, XPU, NPU, MPS, cudaMallocAsync), of NCCL and of libraries that ask
the driver themselves, in whatever state a log or a forum leaves them; and what their figures, rounded as they are, prove.

Not its business: where the log lies and how the answer is shown.

    log.read_log(chunks) ── cleaning (one line: whose, and its text without dress)
                         ── drafts   (phrases and figures in text without white space)
                         ── verdict  (what the figures prove)
"""

from allocscope.allocator.messages.figures import Figure
from allocscope.allocator.messages.judgement import Judgement, Verdict
from allocscope.allocator.messages.log import LogReader, OomReport, read_log
from allocscope.allocator.messages.message import OomMessage, Origin, ProcessFigure
from allocscope.allocator.messages.verdict import judge
from allocscope.allocator.messages.words import amount

__all__ = [
    "Figure",
    "Judgement",
    "LogReader",
    "OomMessage",
    "OomReport",
    "Origin",
    "ProcessFigure",
    "Verdict",
    "amount",
    "judge",
    "read_log",
]
