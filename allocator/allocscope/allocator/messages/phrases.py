"""The phrases by which an out-of-memory text is known, in squeezed text (see `cleaning`): lower case, no white space, no quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator

ANCHORS = (
    "outofmemory",
    "triedtoallocate",
    "allocatedbypytorch",
    "reservedbypytorch",
    "alreadyallocated",
    "reservedintotal",
    "memoryinuse",
    "totalcapac",
    "allocationondevice",
    "failedwithoom",
    "failedtocuda",
    "device-sideassert",
    "internalassertfailed",
    "out_of_memory",
    "out_of_device_memory",
    "alloc_failed",
    "oom_kill",
    "oom-kill",
    "memoryallocation",
    "invalidbuffersize",
    "unabletoallocate",
    "allocatememoryblock",
    "currentlyallocated:",
)
"""Text without any of these holds no message, nor the middle of one."""


HEADED = {
    "totalcapacityof": "total",
    "totalcapactyof": "total",
    "ofwhich": "free",
    "thisprocesshas": "this_process",
    "oftheallocatedmemory": "allocated",
    "currentlyallocated:": "allocated",
    "requested:": "requested",
    "requestedsize:": "requested",
    "devicelimit:": "total",
    "free(accordingtocuda):": "free",
    "memoryfraction):": "limit",
    "mpsallocated:": "allocated",
    "otherallocations:": "other",
    "maxallowed:": "allowed",
}
TAILED = {
    "totalcapac": "total",
    "alreadyallocated": "allocated",
    "currentactive": "active",
    "free": "free",
    "cached": "cached",
    "reservedintotal": "reserved",
    "allowed": "allowed",
    "isallocated": "allocated",
    "isreserved": "unallocated",
    "allocatedinpriv": "private_pools",
}
AFTER = {"free": ";", "cached": ";", "allowed": ".;"}
"""What stands before the amount of a phrase that other texts have too."""
WEAK = frozenset({"requested:", "requestedsize:", "ofwhich", "maxallowed:", "free", "cached", "allowed", "is"})
"""Phrases too common to begin a message whose head is lost."""

_KINDS = ("cuda", "hip", "xpu", "npu", "mps", "mlu", "musa", "mtia", "gcu", "hpu", "sdaa", "dcu", "gpu")

_PHRASES = {
    "oom": rf"(?:{'|'.join(_KINDS)})(?:backend)?outofmemory",
    "tried": r"triedtoallocate",
    "headed": "|".join(map(re.escape, HEADED)),
    "process": r"process\d{1,10}has",
    "tailed": "|".join(TAILED),
    "device": r"hasa(?=total)",
    "retry": r"memoryallocationfailedwithoom",
    "async_pool": r"allocationondevice\d{0,4}(?:wouldexceedallowedmemory)?",
    "policy": r"preemptivelyrejected",
    "singly": r"allocatememoryblockwithsizelargerthan",
    "nccl_head": r"ncclerrorin:",
    "nccl": r"failedtocuda(?:host)?[a-z]{0,12}alloc[a-z]{0,12}\d{1,18}bytes",
    "nccl_failure": r"cudafailure(?:2|\(2\))?:?outofmemory",
    "driver": r"(?:cuda|hip|xpu)(?:driver|runtime)?error:outofmemory|cudaruntimeerror\(2\):outofmemory"
    r"|(?:cuda|hip)_error_out_of_memory|cudaerrormemoryallocation|hiperroroutofmemory|error_out_of_device_memory",
    "library": r"cu(?:blas|dnn|solver|sparse)_status_alloc_failed|cufft_alloc_failed",
    "masked": r"nvml_success==.{0,80}?internalassertfailed|handles_\.at\(i\).{0,8}internalassertfailed",
    "assertion": r"device-sideasserttriggered",
    "cpu": r"defaultcpuallocator",
    "array": r"unabletoallocate(?=\d[\d.]{0,20}[kmgtpe]?i?b(?:ytes)?foranarray)",
    "killed": r"outofmemory:killedprocess|oom[-_]kill(?:event|:)",
    "invalid": r"invalidbuffersize:",
    "split": r"max_split_size_mb",
    "conf": r"pytorch_[a-z_]{0,10}alloc_conf=expandable_segments",
    "manual": r"documentationformemorymanagement",
}
_PHRASE = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PHRASES.items()))
_BEGINNINGS = (
    *(f"{kind}outofmemory" for kind in _KINDS),
    "mpsbackendoutofmemory",
    "triedtoallocate",
    *HEADED,
    "process",
    *TAILED,
    "hasatotal",
    "memoryallocationfailedwithoom",
    "allocationondevice",
    "preemptivelyrejected",
    "allocatememoryblock",
    "ncclerrorin:",
    "failedtocuda",
    "cudafailure",
    *(f"{kind}{which}error:outofmemory" for kind in ("cuda", "hip", "xpu") for which in ("", "driver", "runtime")),
    "cudaruntimeerror(2)",
    "cuda_error_out_of_memory",
    "hip_error_out_of_memory",
    "cudaerrormemoryallocation",
    "hiperroroutofmemory",
    "error_out_of_device_memory",
    *(f"cu{library}_status_alloc_failed" for library in ("blas", "dnn", "solver", "sparse")),
    "cufft_alloc_failed",
    "nvml_success==",
    "handles_.at(i)",
    "device-sideassert",
    "defaultcpuallocator",
    "unabletoallocate",
    "outofmemory:killed",
    "oom_kill",
    "oom-kill",
    "invalidbuffersize:",
    "max_split_size_mb",
    "pytorch_",
    "documentationformemorymanagement",
)
"""How the phrases begin: looking for each of these is many times as fast as trying `_PHRASE` everywhere."""
_BEGINNING = re.compile(
    "outofmemoryerror|wouldexceedallowedmemory|"
    + "|".join(_PHRASES[name] for name in ("oom", "retry", "nccl_head", "driver", "library", "cpu", "killed"))
)
AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)(bytes?|[kmgtpe]i?b|b)")
AMOUNT_BEFORE = re.compile(r"(?<!\d)(?<!\d\.)(\d{1,18}(?:\.\d{1,6})?)(bytes?|[kmgtpe]i?b|b)$")
BARE = re.compile(r"(\d{1,18})(?![\d.])")
IN_BRACKETS = re.compile(r"\(([a-z]{2,8}?)(\d{1,4})?;")
IN_BRACKETS_BEFORE = re.compile(r"\(([a-z]{2,8}?)(\d{1,4})?;$")
DEVICE_BEFORE = re.compile(r"[a-z]{2,8}?(\d{1,4})$")
RETRY = re.compile(
    r"memoryallocationfailedwithoom(?:ondevice(\d{1,4})(?!\d))?(?:whiletryingtoallocate(\d{1,18})bytes)?"
    r"(?:\(free:(\d{1,18})(?=,),?)?(?:total:(\d{1,18})\))?"
)


def begins_message(squeezed: str) -> bool:
    """Is the beginning of a message in it?"""
    return _BEGINNING.search(squeezed) is not None


def anchored(squeezed: str) -> bool:
    """May this hold a message, or the middle of one?"""
    return any(anchor in squeezed for anchor in ANCHORS)


def phrases(text: str) -> Iterator[re.Match[str]]:
    """The phrases in text, in order, none within another."""
    starts = set()
    for beginning in _BEGINNINGS:
        at = text.find(beginning)
        while at >= 0:
            starts.add(at)
            at = text.find(beginning, at + 1)
    end = 0
    for start in sorted(starts):
        if start >= end and (found := _PHRASE.match(text, start)):
            end = found.end()
            yield found
