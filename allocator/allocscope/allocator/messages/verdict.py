"""What the figures of an out-of-memory text prove, and what they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from allocscope.allocator.messages.figures import Figure, Range
from allocscope.allocator.messages.message import OomMessage, Origin
from allocscope.allocator.messages.standing import GIB, Standing, standing

MIB = 1 << 20

NEARLY_FULL = 50
"""Less than one part in so many of what is reserved is free inside: then fragmentation is not what is wrong."""
DOMINANT = 2
"""Others hold so many times as much as is stranded: then they are named first."""
NOTABLE = 100
"""Others count from one part in so many of the device on."""
XPU_SINGLE_BYTES = 4 * GIB
"""Intel devices refuse a larger single allocation unless relaxed limits are set."""


class Verdict(Enum):
    """Why a request failed."""

    FRAGMENTATION = "fragmentation"
    """What was free, stranded in holes and on the device together, would have held it."""
    CAPACITY = "capacity"
    """All that was free would not have held it."""
    OTHER_PROCESSES = "other_processes"
    """What others hold on the device would have."""
    LIMIT = "limit"
    """A limit below the device's memory."""
    NOT_DEVICE_MEMORY = "not_device_memory"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its reasons."""

    verdict: Verdict
    reasons: tuple[str, ...]
    advice: tuple[str, ...] = ()
    """What to try; only what the facts bear out."""
    own_pid: int | None = None
    """Which `Process N` is in truth this job, seen from inside a container."""


def judge(message: OomMessage) -> Judgement:
    """The verdict on a message of any origin, from PyTorch 1.0 to 2.14; raises nothing.

    Printed figures are rounded (to two decimals of a unit): what follows for some of the amounts that a print stands for and
    not for others is not called; it is `unknown`, and the reasons say that it is close.
    """
    by_origin = _BY_ORIGIN.get(message.origin)
    if by_origin:
        return by_origin
    if message.over_limit:
        return Judgement(
            Verdict.NOT_DEVICE_MEMORY,
            (
                "more than an exabyte was asked for: a size gone wrong (negative, overflown or overwritten), not a lack of memory",
            ),
            ("look at the sizes that reach the failing line; after a communication error they may be garbage",),
        )
    if message.origin is Origin.POLICY:
        return _policy(message)
    if message.origin is Origin.ASYNC:
        return _async_pool(message)
    if message.kind == "mps":
        return _mps(message)
    return _caching(message, standing(message))


_OUTSIDE_ADVICE = (
    "leave such callers room: lower the batch, or cap PyTorch with torch.cuda.set_per_process_memory_fraction",
    "see how much PyTorch had reserved at that moment (allocscope bill JOB, or a snapshot)",
)
_BY_ORIGIN = {
    Origin.RETRY: Judgement(
        Verdict.UNKNOWN,
        ("by itself no out-of-memory: an attempt failed, and PyTorch makes it again after giving back what it caches",),
        ("many of these cost time, and the job is near its end: see allocscope inspect, or allocscope risks",),
    ),
    Origin.ASSERT: Judgement(
        Verdict.NOT_DEVICE_MEMORY,
        (
            "a kernel's assertion failed (an index out of range, say); what fails after it, allocations too, fails for it",
        ),
        ("run with CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see which operation it is",),
    ),
    Origin.HOST: Judgement(
        Verdict.NOT_DEVICE_MEMORY,
        ("the computer's own memory ran out, not a device's",),
        (
            "look at the job's host memory limit (cgroup, Slurm --mem, pod), data loader workers, pinned memory, /dev/shm",
        ),
    ),
    Origin.NCCL: Judgement(
        Verdict.UNKNOWN,
        (
            "NCCL asked the driver itself, beside PyTorch's allocator, and nothing was left for it",
            "the text does not say who held what",
        ),
        _OUTSIDE_ADVICE,
    ),
    Origin.DRIVER: Judgement(
        Verdict.UNKNOWN,
        (
            "the driver refused a request made beside PyTorch's allocator (a context, a kernel's stack, a library, pinned memory)",
            "the text has no figures",
        ),
        _OUTSIDE_ADVICE,
    ),
    Origin.LIBRARY: Judgement(
        Verdict.UNKNOWN,
        (
            "a library (cuBLAS, cuDNN) could not allocate its workspace or handle beside PyTorch's allocator; there are no figures",
        ),
        _OUTSIDE_ADVICE,
    ),
    Origin.MASKED: Judgement(
        Verdict.UNKNOWN,
        (
            (
                "an out-of-memory whose text is lost: PyTorch failed an assertion while it was handling it"
                " (NVML is missing or refuses, as on Jetson, under MIG and in some containers; or an expandable segment was left broken)"
            ),
        ),
        ("take it for an out-of-memory, and record a snapshot before it: allocscope capture JOB",),
    ),
}


def _policy(message: OomMessage) -> Judgement:
    asked = f"{_said(message.requested)} was" if message.requested else "a request was"
    return Judgement(
        Verdict.LIMIT,
        (f"{asked} refused before the driver was asked: it would have exceeded per_process_memory_fraction",),
        (
            "raise per_process_memory_fraction, or let go of throw_on_cudamalloc_oom: with it cached memory is not given back first",
        ),
    )


def _mps(message: OomMessage) -> Judgement:
    need = Range.of(message.requested)
    if message.requested and message.allocated is None and message.allowed is None:
        return Judgement(
            Verdict.LIMIT,
            (f"{_said(message.requested)} is more than Metal gives in one buffer",),
            ("use smaller tensors",),
        )
    if not (message.requested and message.allocated and message.allowed):
        return Judgement(Verdict.UNKNOWN, ("the text is cut before it says enough",))
    held = Range.of(message.allocated) + (Range.of(message.other) if message.other else Range(0, 0))
    if (held + need).below(Range.of(message.allowed)):
        return Judgement(
            Verdict.UNKNOWN,
            (f"what is held and {_said(message.requested)} come to less than the {_said(message.allowed)} allowed",),
        )
    reasons = [
        f"PyTorch holds {_said(message.allocated)} of the {_said(message.allowed)} that it allows itself under MPS"
    ]
    if message.other:
        reasons.append(f"what else Metal gave to this process holds {_said(message.other)}")
    return Judgement(
        Verdict.LIMIT,
        tuple(reasons),
        (
            "lower the batch or the model's size",
            "PYTORCH_MPS_HIGH_WATERMARK_RATIO raises the limit, at the whole system's risk",
        ),
    )


def _async_pool(message: OomMessage) -> Judgement:
    need, free, total = Range.of(message.requested), Range.of(message.free), Range.of(message.total)
    held = Range.of(message.allocated)
    if not (message.requested and message.allocated):
        return Judgement(Verdict.UNKNOWN, ("the text is cut before it says enough",))
    if message.limit and not (held + need).below(Range.of(message.limit)):
        return Judgement(
            Verdict.LIMIT,
            (f"with {_said(message.allocated)} allocated it would exceed the memory fraction, {_said(message.limit)}",),
            ("raise torch.cuda.set_per_process_memory_fraction",),
        )
    if message.total is None:
        return Judgement(Verdict.UNKNOWN, ("the text is cut before it says enough",))
    if total.below(need + held):
        return Judgement(
            Verdict.CAPACITY,
            (
                f"{_said(message.allocated)} allocated and {_said(message.requested)} asked for exceed the device's {_said(message.total)}",
            ),
            _SMALLER,
        )
    if message.free and free.at_least(need + Range(_margin(total), _margin(total))):
        return _had_room(message)
    missing = total - held - free
    return Judgement(
        Verdict.UNKNOWN,
        (
            (
                f"{_about(missing)} of the device are neither free nor allocated:"
                " the driver's pool (its holes), memory beside it, or other processes; cudaMallocAsync does not say which"
            ),
        ),
        ("see nvidia-smi for other processes; PyTorch's own allocator with expandable_segments:True tells more",),
    )


# --- the caching allocator --------------------------------------------------------------------------------------------------

_Rule = Callable[[OomMessage, Standing], Judgement | None]


def _caching(message: OomMessage, at: Standing) -> Judgement:
    for rule in _RULES:
        judgement = rule(message, at)
        if judgement:
            notes = tuple(_notes(message, at))
            return Judgement(judgement.verdict, judgement.reasons + notes, judgement.advice, at.own_pid)
    raise AssertionError("the last rule judges everything")


def _more_than_the_device(message: OomMessage, at: Standing) -> Judgement | None:
    if message.requested and message.total and at.total.below(at.requested):
        why = f"{_said(message.requested)} is more than the whole device, {_said(message.total)}"
        return Judgement(Verdict.CAPACITY, (why,), ("ask for less at once: smaller batches, sequences or images",))
    if message.allocated and message.total and at.total.below(at.live):
        why = f"PyTorch holds {_said(message.allocated)} on a device of {_said(message.total)}: the driver lends host memory (Windows)"
        return Judgement(Verdict.CAPACITY, (why, "and that is used up too"), _SMALLER)
    return None


def _single_allocation(message: OomMessage, at: Standing) -> Judgement | None:
    advice = ("UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1 lifts it where the driver bears it", "use smaller tensors")
    if message.kind == "xpu" and message.limit:
        return Judgement(
            Verdict.LIMIT, (f"the device takes no single allocation of more than {_said(message.limit)}",), advice
        )
    if (
        message.kind != "xpu"
        or not message.requested
        or at.requested.high is None
        or at.requested.high < XPU_SINGLE_BYTES
    ):
        return None
    room = at.free if at.free_known else at.total - at.reserved
    if message.total and at.reserved_known and room.at_least(at.requested):
        why = (
            f"{_said(message.requested)} in one piece: Intel devices take no single allocation of more than about 4 GiB"
        )
        return Judgement(Verdict.LIMIT, (why, "PyTorch itself holds far too little to fill the device"), advice)
    return None


def _allowed(message: OomMessage, at: Standing) -> Judgement | None:
    if message.allowed is None or message.requested is None:
        return None
    allowed = Range.of(message.allowed)
    need = at.reserved + at.requested
    room = at.free_known and at.free.at_least(at.requested)
    exceeds = allowed.below(need) if at.reserved_known else allowed.below(at.requested)
    if not exceeds and not (room and not need.below(allowed)):
        return None
    if at.stranded_known and at.stranded.at_least(at.requested) and at.free_known and at.stranded.at_least(at.free):
        return None
    why = f"{_said(message.allowed)} is allowed to this process, and PyTorch has reserved {_about(at.reserved)} of it"
    if not at.reserved_known:
        why = f"{_said(message.allowed)} is allowed to this process"
    reasons = [why]
    if not exceeds:
        reasons.append("close: the figures are rounded, but nothing else explains it with that much free on the device")
    if at.stranded_known and at.stranded.at_least(at.requested):
        reasons.append(f"{_about(at.stranded)} within the limit were free in holes")
    return Judgement(
        Verdict.LIMIT, tuple(reasons), ("raise the memory fraction (torch.cuda.set_per_process_memory_fraction)",)
    )


def _room_on_the_device(message: OomMessage, at: Standing) -> Judgement | None:
    if not (message.requested and at.free_known):
        return None
    margin = _margin(at.total)
    if not at.free.at_least(at.requested + Range(margin, margin)):
        return None
    spare = at.free - at.requested
    if at.others.low >= max(spare.low, GIB):
        reasons = (
            f"the device had {_said(message.free)} free when this was written, more than the {_said(message.requested)} asked for",
            f"others hold {_about(at.others)} of it, and one that takes and gives back meanwhile would explain it",
        )
        return Judgement(Verdict.OTHER_PROCESSES, reasons, _others_advice(message, at))
    return _had_room(message)


def _had_room(message: OomMessage) -> Judgement:
    return Judgement(
        Verdict.NOT_DEVICE_MEMORY,
        (
            f"the device had {_said(message.free)} free, far more than the {_said(message.requested)} asked for",
            "the driver refused it for another reason than the device's memory",
        ),
        (
            "look at the host: on Windows the page file (commit limit); a cgroup or ulimit; WSL's or a virtual GPU's own limits",
        ),
    )


def _stranded_or_others(message: OomMessage, at: Standing) -> Judgement | None:
    if not message.requested:
        return None
    together = at.free + at.stranded
    fits = (
        at.stranded_known
        and together.at_least(at.requested)
        and (at.free.below(at.requested) or at.stranded.at_least(at.requested))
    )
    notable = at.others.low * NOTABLE >= (at.total.high or 0) and at.others.low > 0 and message.total is not None
    others_would = notable and at.free.low + at.others.low >= (at.requested.high or 0)
    if fits and not (others_would and at.others.low >= DOMINANT * (at.stranded.high or 0)):
        return _fragmented(message, at)
    if others_would:
        reasons = [_others_hold(at)]
        if fits:
            reasons.append(f"{_about(at.stranded)} free in holes would have held the {_said(message.requested)} too")
        elif not at.stranded_known:
            reasons.append("the text is cut before it says how much was free in holes")
        return Judgement(Verdict.OTHER_PROCESSES, tuple(reasons), _others_advice(message, at))
    return None


def _fragmented(message: OomMessage, at: Standing) -> Judgement:
    if at.reserved_known and (at.stranded.high or 0) * NEARLY_FULL < at.reserved.low:
        reasons = (
            (
                f"{_about(at.stranded)} free in holes would have held this {_said(message.requested)}, but hardly the next:"
                f" next to all of the {_about(at.reserved)} that PyTorch reserved was live"
            ),
        )
        return Judgement(
            Verdict.CAPACITY, reasons, (_SMALLER[0], "a setting of the allocator would hardly have put it off")
        )
    free = f", and {_said(message.free)} on the device" if message.free and message.free.bytes else ""
    reasons = (
        f"{_about(at.stranded)} lay free in holes of what PyTorch reserved{free}: more than the {_said(message.requested)} asked for",
        "no hole was large enough",
    )
    return Judgement(Verdict.FRAGMENTATION, reasons, _fragmentation_advice(message))


def _too_much(message: OomMessage, at: Standing) -> Judgement | None:
    if not (message.requested and at.stranded_known and (at.free_known or message.total)):
        return None
    together = at.free + at.stranded
    if together.below(at.requested):
        why = f"all that was free, {_about(together)} (holes and the device together), is less than the {_said(message.requested)} asked for"
        return Judgement(Verdict.CAPACITY, (why,), _SMALLER)
    return None


def _not_called(message: OomMessage, at: Standing) -> Judgement:
    if not message.requested:
        if at.stranded_known and at.stranded.low >= max(at.live.high or 0, GIB):
            why = f"{_about(at.stranded)} lay free in holes, more than was live ({_about(at.live)}); what was asked for is not in the text"
            return Judgement(Verdict.FRAGMENTATION, (why,), _fragmentation_advice(message))
        return Judgement(Verdict.UNKNOWN, ("the text does not say what was asked for",))
    if at.free_known and at.free.at_least(at.requested):
        why = (
            f"close: the device had {_said(message.free)} free, hardly more than the {_said(message.requested)} asked for;"
            " a driver may refuse before the last of it is given"
        )
        return Judgement(Verdict.UNKNOWN, (why,))
    if at.stranded_known and at.free_known:
        why = (
            f"close: all that was free, {_about(at.free + at.stranded)}, and the {_said(message.requested)} asked for cannot be told"
            " apart, rounded as they are printed"
        )
        return Judgement(
            Verdict.UNKNOWN, (why,), ("take a snapshot of such a moment: allocscope inspect tells to the byte",)
        )
    if not at.free_known and message.total:
        why = f"the text does not say how much was free: {_about(at.total - at.reserved)} of the device are not PyTorch's of this process"
        return Judgement(Verdict.UNKNOWN, (why, "others may hold them, or something limits a single allocation"))
    return Judgement(Verdict.UNKNOWN, ("the text does not say how much was free",))


_RULES: tuple[_Rule, ...] = (
    _more_than_the_device,
    _single_allocation,
    _allowed,
    _room_on_the_device,
    _stranded_or_others,
    _too_much,
    _not_called,
)


def _notes(message: OomMessage, at: Standing) -> list[str]:
    """What is worth knowing beside the verdict."""
    notes = []
    if at.own_pid is not None:
        notes.append(
            f"Process {at.own_pid} is this job itself, seen from inside a container: there is no room for it beside"
        )
    elif at.among_named:
        notes.append("one of the named processes is this job itself, seen from inside a container")
    if message.private_pools and message.private_pools.bytes:
        notes.append(
            f"{_said(message.private_pools)} more lay free in private pools (CUDA graphs), of no use to others"
        )
    outside = Range.of(message.this_process) - at.reserved
    if message.this_process and at.reserved_known and outside.low > 3 * GIB:
        notes.append(f"{_about(outside)} of this process are outside PyTorch's allocator (context, NCCL, libraries)")
    return notes


# --- words ------------------------------------------------------------------------------------------------------------------

_SMALLER = (
    "need less: a smaller batch or sequence, activation checkpointing, a sharded optimizer or model, offloading",
    "no setting of the allocator would have made room",
)


def _fragmentation_advice(message: OomMessage) -> tuple[str, ...]:
    if message.kind == "xpu":
        return ("make the sizes steadier (pad to a few lengths)",)
    if message.expandable:
        return (
            (
                "expandable segments are on already (PyTorch 2.14 no longer recommends them):"
                " see with allocscope inspect which live blocks, streams or pools pin the holes"
            ),
        )
    name = message.conf_name or {"hip": "PYTORCH_HIP_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}.get(
        message.kind or "", "PYTORCH_CUDA_ALLOC_CONF"
    )
    old = " (PyTorch 2.1 on; before that max_split_size_mb)" if message.reserved and message.kind != "npu" else ""
    on = "" if message.expandable is None else " unless it is on already (before 2.14 the text recommends it even then)"
    return (
        f"{name}=expandable_segments:True{old}{on}",
        "make the sizes steadier (pad to a few lengths), or allocate the largest first",
    )


def _others_hold(at: Standing) -> str:
    if at.others_named.low * 2 >= at.others.low:
        return f"other processes hold {_about(at.others_named)} of the device, without which it would have fitted"
    return (
        f"{_about(at.others)} of the device are neither free nor this process's, without which it would have fitted:"
        " other processes (of other containers too), or the host where memory is shared with it"
    )


def _others_advice(message: OomMessage, at: Standing) -> tuple[str, ...]:
    named = [p for p in message.other_processes if p.pid != at.own_pid]
    alike = Counter(p.used for p in named if p.used and p.used.high_bytes < 2 * GIB).most_common(1)
    if alike and alike[0][1] >= 3:
        used, count = alike[0]
        return (
            (
                f"{count} processes with the same {_said(used)} look like other ranks' contexts on this device:"
                " call torch.cuda.set_device(local_rank) before anything else touches CUDA, and load checkpoints with map_location"
            ),
        )
    pids = ", ".join(str(p.pid) for p in named[:4])
    return (
        f"see who they are (pid {pids})" if pids else "see who holds it: nvidia-smi on the host, not in the container",
    )


def _margin(total: Range) -> int:
    """How much more than asked for must be free before the driver's own granularity is no explanation."""
    return max(64 * MIB, (total.low or 0) // 200)


def _said(figure: Figure | None) -> str:
    return "an unknown amount" if figure is None else amount(figure.bytes)


def _about(between: Range) -> str:
    if between.high is None:
        return f"at least {amount(between.low)}"
    middle = amount((between.low + between.high) // 2)
    return middle if between.high - between.low <= max(between.low // 50, MIB // 50) else f"about {middle}"


def amount(amount_bytes: int) -> str:
    """An amount as PyTorch prints it: `17.20 GiB`, `1024.00 MiB`."""
    for step, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if amount_bytes > step:
            return f"{amount_bytes / step:.2f} {unit}"
    return f"{amount_bytes} bytes"
