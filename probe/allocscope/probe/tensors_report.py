"""One report of who holds the live tensors: in which order it is looked, and how long at what."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from allocscope.model.tensors import TensorReport
from allocscope.probe.tensors_allocator import requested_bytes
from allocscope.probe.tensors_frames import TELLS
from allocscope.probe.tensors_graph import Graph
from allocscope.probe.tensors_holders import Holders
from allocscope.probe.tensors_modules import Modules
from allocscope.probe.tensors_pace import Pace
from allocscope.probe.tensors_rows import Rows, Summary
from allocscope.probe.tensors_scan import Scan
from allocscope.probe.tensors_torch import TorchObjects
from allocscope.probe.torch_cuda import Absence, TorchCuda, look

NO_GIL = "this Python runs threads without a lock: they would change what is looked at"
SCAN_UNTIL, GRAPH_UNTIL, GRADIENTS_UNTIL, NAMES_UNTIL = 0.4, 0.6, 0.65, 0.9
"""Parts of the time limit: what was not looked at by then is left out."""


def report(time_us: int, pace: Pace, device_type: str, modules: Mapping[str, Any]) -> TensorReport:
    """Of the tensors on devices of that type, by the torch among these imported modules."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return TensorReport(time_us, device_type, absence=NO_GIL, complete=False)
    cuda = look(modules) if device_type == "cuda" else None
    if isinstance(cuda, Absence):
        return TensorReport(time_us, device_type, absence=cuda.value)
    try:
        torch = TorchObjects(modules, device_type)
    except (KeyError, AttributeError) as error:
        return TensorReport(time_us, device_type, absence=f"torch is not imported, or before 2.0: no {error}")
    with torch.quiet():
        summary = _look(torch, cuda, pace, modules)
    return TensorReport(
        time_us,
        device_type,
        took_us=pace.took_us,
        complete=pace.complete,
        left_out=pace.left_out,
        devices=summary.devices(),
        totals=summary.totals(),
        groups=summary.groups(),
        rows=tuple(summary.rows),
        more_rows=summary.more_rows,
        more_rows_bytes=summary.more_rows_bytes,
    )


def _look(torch: TorchObjects, cuda: TorchCuda | None, pace: Pace, imported: Mapping[str, Any]) -> Summary:
    pace.until(SCAN_UNTIL)
    scan = Scan(torch, pace)
    scan.run()
    found = scan.catalogue
    requested = {} if cuda is None else requested_bytes(cuda)
    pace.until(GRAPH_UNTIL)
    Graph(torch, found, pace).run()
    pace.until(GRADIENTS_UNTIL)
    scan.gradients()
    pace.until(NAMES_UNTIL)
    modules = Modules(found, pace)
    holders = Holders(modules, found.gradients, imported, pace)
    holders.look({*found.of_tensor, *found.roots, *modules.roots()})
    if not TELLS:
        pace.leave_out("variables of running functions: this Python does not tell them", complete=True)
    if torch.without_storage:
        told = f"{torch.without_storage:,} tensors without a storage of their own (sparse ones, functorch's)"
        pace.leave_out(f"{told}: what they hold is not told", complete=True)
    pace.until(1.0)
    summary = Summary(requested)
    for row in Rows(found, modules, holders, pace).of(found.storages.values()):
        summary.add(row)
    return summary
