"""Allocscope's words as frozen values: what a process, a device, a sample, a block map, a bill, a forecast is.

Pure, standard library only, Python 3.10: the probe carries it into other people's training jobs.
Not here: how values are got, judged or kept. The wire has one module, `allocscope.model.wire`, which alone imports protobuf
and is not imported from here.

`None` means not known; zero means zero. Sizes are bytes, times are unix microseconds by the clock of whoever took them.
"""

from allocscope.model.advice import Advice, AdviceKind, Trial
from allocscope.model.bill import BillEntry, DeviceBill, Line
from allocscope.model.blocks import BlockGroup, BlockMap, Pool, PrivatePool, SizeClass
from allocscope.model.captures import Capture, CaptureNote, CaptureReason
from allocscope.model.condense import condense, size_class_floor
from allocscope.model.events import Event, EventKind
from allocscope.model.forecast import Cause, Forecast, State
from allocscope.model.identity import AllocatorRef, Device, Process
from allocscope.model.node import DeviceProcess, DeviceReading, Owner
from allocscope.model.orders import CaptureOrder, Intervals, Order
from allocscope.model.sample import COLUMNS, Sample, SampleChunk, chunks

__all__ = [
    "COLUMNS",
    "Advice",
    "AdviceKind",
    "AllocatorRef",
    "BillEntry",
    "BlockGroup",
    "BlockMap",
    "Capture",
    "CaptureNote",
    "CaptureOrder",
    "CaptureReason",
    "Cause",
    "Device",
    "DeviceBill",
    "DeviceProcess",
    "DeviceReading",
    "Event",
    "EventKind",
    "Forecast",
    "Intervals",
    "Line",
    "Order",
    "Owner",
    "Pool",
    "PrivatePool",
    "Process",
    "Sample",
    "SampleChunk",
    "SizeClass",
    "State",
    "Trial",
    "chunks",
    "condense",
    "size_class_floor",
]
