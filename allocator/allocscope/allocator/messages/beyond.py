"""Judgements on what did not come from PyTorch's caching allocator on a device of its own."""

from __future__ import annotations

from allocscope.allocator.messages.figures import Range
from allocscope.allocator.messages.judgement import Judgement, Verdict
from allocscope.allocator.messages.message import OomMessage, Origin
from allocscope.allocator.messages.standing import MIB
from allocscope.allocator.messages.words import SMALLER, WHOLE, about, said

_OUTSIDE_ADVICE = (
    "leave such callers room: lower the batch, or cap PyTorch with torch.cuda.set_per_process_memory_fraction",
    "see how much PyTorch had reserved at that moment (allocscope bill JOB, or a snapshot)",
)
BY_ORIGIN = {
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
        ("take it for an out-of-memory, and record a snapshot before it: torch.cuda.memory._dump_snapshot",),
    ),
}


def policy(message: OomMessage) -> Judgement:
    """A request refused before the driver was asked (PyTorch 2.12 on)."""
    asked = f"{said(message.requested)} was" if message.requested else "a request was"
    return Judgement(
        Verdict.LIMIT,
        (f"{asked} refused before the driver was asked: it would have exceeded per_process_memory_fraction",),
        (
            "raise per_process_memory_fraction, or let go of throw_on_cudamalloc_oom: with it cached memory is not given back first",
        ),
    )


def mps(message: OomMessage) -> Judgement:
    """An out-of-memory of Metal: always a limit, of a buffer or of the high watermark."""
    need = Range.of(message.requested)
    if message.over_limit:
        return Judgement(
            Verdict.LIMIT,
            (f"{said(message.requested)} is more than Metal gives in one buffer",),
            ("use smaller tensors",),
        )
    if not (message.requested and message.allocated and message.allowed):
        return Judgement(Verdict.UNKNOWN, ("the text is cut before it says enough",), WHOLE)
    held = Range.of(message.allocated) + (Range.of(message.other) if message.other else Range(0, 0))
    if (held + need).below(Range.of(message.allowed)):
        why = f"what is held and the {said(message.requested)} come to less than the {said(message.allowed)} allowed"
        return Judgement(
            Verdict.UNKNOWN,
            (why, "Metal takes whole heaps, so that it may refuse a little before the limit"),
            ("ask for less at once: smaller batches, sequences or images",),
        )
    reasons = [
        f"PyTorch holds {said(message.allocated)} of the {said(message.allowed)} that it allows itself under MPS"
    ]
    if message.other:
        reasons.append(f"what else Metal gave to this process holds {said(message.other)}")
    return Judgement(
        Verdict.LIMIT,
        tuple(reasons),
        (
            "lower the batch or the model's size",
            "PYTORCH_MPS_HIGH_WATERMARK_RATIO raises the limit, at the whole system's risk",
        ),
    )


def async_pool(message: OomMessage) -> Judgement:
    """An out-of-memory of the cudaMallocAsync backend, which says little."""
    need, free, total = Range.of(message.requested), Range.of(message.free), Range.of(message.total)
    held = Range.of(message.allocated)
    if not (message.requested and message.allocated):
        return Judgement(Verdict.UNKNOWN, ("the text is cut before it says enough",), WHOLE)
    room = message.free is not None and free.at_least(need + Range(margin(total), margin(total)))
    limit = Range.of(message.limit)
    if message.limit and (limit.below(held + need) or (room and not (held + need).below(limit))):
        return Judgement(
            Verdict.LIMIT,
            (f"with {said(message.allocated)} allocated it would exceed the memory fraction, {said(message.limit)}",),
            ("raise torch.cuda.set_per_process_memory_fraction",),
        )
    if message.total is None:
        return Judgement(Verdict.UNKNOWN, ("the text is cut before it says enough",), WHOLE)
    if total.below(need + held):
        return Judgement(
            Verdict.CAPACITY,
            (
                f"{said(message.allocated)} allocated and {said(message.requested)} asked for exceed the device's {said(message.total)}",
            ),
            SMALLER,
        )
    if room:
        return had_room(message)
    missing = total - held - free
    return Judgement(
        Verdict.UNKNOWN,
        (
            (
                f"{about(missing)} of the device are neither free nor allocated:"
                " the driver's pool (its holes), memory beside it, or other processes; cudaMallocAsync does not say which"
            ),
        ),
        ("see nvidia-smi for other processes; PyTorch's own allocator with expandable_segments:True tells more",),
    )


def had_room(message: OomMessage) -> Judgement:
    """The device had room, so it is not the device."""
    return Judgement(
        Verdict.NOT_DEVICE_MEMORY,
        (
            f"the device had {said(message.free)} free, far more than the {said(message.requested)} asked for",
            "the driver refused it for another reason than the device's memory",
        ),
        (
            "look at the host: on Windows the page file (commit limit); a cgroup or ulimit; WSL's or a virtual GPU's own limits",
        ),
    )


def margin(total: Range) -> int:
    """How much more than asked for must be free before the driver's own granularity is no explanation."""
    return max(64 * MIB, (total.low or 0) // 200)
