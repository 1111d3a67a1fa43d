"""What the figures of an out-of-memory text prove, and what they do not."""

from __future__ import annotations

from collections.abc import Callable

from allocscope.allocator.messages.beyond import BY_ORIGIN, async_pool, had_room, margin, mps, policy
from allocscope.allocator.messages.figures import Range
from allocscope.allocator.messages.judgement import Judgement, Verdict
from allocscope.allocator.messages.message import OomMessage, Origin
from allocscope.allocator.messages.standing import GIB, Standing, standing
from allocscope.allocator.messages.words import (
    NO_SETTING,
    SMALLER,
    SNAPSHOT,
    WHOLE,
    about,
    fragmentation_advice,
    others_advice,
    others_hold,
    said,
)

NEARLY_FULL = 50
"""Less than one part in so many of what is reserved is free inside: then fragmentation is not what is wrong."""
DOMINANT = 2
"""Others hold so many times as much as is stranded: then they are named first."""
NOTABLE = 100
"""Others count from one part in so many of the device on."""
XPU_SINGLE_BYTES = 4 * GIB
"""Intel devices refuse a larger single allocation unless relaxed limits are set."""


def judge(message: OomMessage) -> Judgement:
    """The verdict on a message of any origin, from PyTorch 1.0 to 2.14; raises nothing.

    Printed figures are rounded (to two decimals of a unit): what follows for some of the amounts that a print stands for and
    not for others is not called; it is `unknown`, and the reasons say that it is close.
    """
    by_origin = BY_ORIGIN.get(message.origin)
    if by_origin:
        return by_origin
    if message.origin is Origin.POLICY:
        return policy(message)
    if message.origin is Origin.ASYNC:
        return async_pool(message)
    if message.kind == "mps":
        return mps(message)
    if message.over_limit:
        return Judgement(
            Verdict.NOT_DEVICE_MEMORY,
            (
                "more than an exabyte was asked for: a size gone wrong (negative, overflown or overwritten), not a lack of memory",
            ),
            ("look at the sizes that reach the failing line; after a communication error they may be garbage",),
        )
    return _caching(message, standing(message))


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
        why = f"{said(message.requested)} is more than the whole device, {said(message.total)}"
        return Judgement(Verdict.CAPACITY, (why,), ("ask for less at once: smaller batches, sequences or images",))
    if message.allocated and message.total and at.total.below(at.live):
        why = f"PyTorch holds {said(message.allocated)} on a device of {said(message.total)}: the driver lends host memory (Windows)"
        return Judgement(Verdict.CAPACITY, (why, "and that is used up too", NO_SETTING), SMALLER)
    return None


def _single_allocation(message: OomMessage, at: Standing) -> Judgement | None:
    advice = ("UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1 lifts it where the driver bears it", "use smaller tensors")
    if message.kind == "xpu" and message.limit:
        return Judgement(
            Verdict.LIMIT, (f"the device takes no single allocation of more than {said(message.limit)}",), advice
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
            f"{said(message.requested)} in one piece: Intel devices take no single allocation of more than about 4 GiB"
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
        return _fragmented(message, at)
    why = f"{said(message.allowed)} is allowed to this process, and PyTorch has reserved {about(at.reserved)} of it"
    if not at.reserved_known:
        why = f"{said(message.allowed)} is allowed to this process"
    reasons = [why]
    if not exceeds:
        reasons.append(
            "a close call: the figures are rounded, but nothing else explains it with that much free on the device"
        )
    if at.stranded_known and at.stranded.at_least(at.requested):
        reasons.append(f"{about(at.stranded)} within the limit were free in holes")
    return Judgement(
        Verdict.LIMIT, tuple(reasons), ("raise the memory fraction (torch.cuda.set_per_process_memory_fraction)",)
    )


def _room_on_the_device(message: OomMessage, at: Standing) -> Judgement | None:
    if not (message.requested and at.free_known):
        return None
    spare = margin(at.total)
    if not at.free.at_least(at.requested + Range(spare, spare)):
        return None
    if at.others.low >= max((at.free - at.requested).low, GIB):
        reasons = (
            f"the device had {said(message.free)} free when this was written, more than the {said(message.requested)} asked for",
            f"others hold {about(at.others)} of it, and one that takes and gives back meanwhile would explain it",
        )
        return Judgement(Verdict.OTHER_PROCESSES, reasons, others_advice(message, at))
    return had_room(message)


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
        reasons, advice = [others_hold(at)], others_advice(message, at)
        if fits:
            reasons.append(f"{about(at.stranded)} free in holes would have held the {said(message.requested)} too")
            advice += fragmentation_advice(message)
        elif not at.stranded_known:
            reasons.append("the text is cut before it says how much was free in holes")
        return Judgement(Verdict.OTHER_PROCESSES, tuple(reasons), advice)
    return None


def _fragmented(message: OomMessage, at: Standing) -> Judgement:
    if at.reserved_known and (at.stranded.high or 0) * NEARLY_FULL < at.reserved.low:
        why = (
            f"{about(at.stranded)} free in holes would have held this {said(message.requested)}, but hardly the next:"
            f" next to all of the {about(at.reserved)} that PyTorch reserved was live"
        )
        return Judgement(Verdict.CAPACITY, (why, "a setting of the allocator would hardly have put it off"), SMALLER)
    free = f", and {said(message.free)} on the device" if message.free and message.free.bytes else ""
    reasons = (
        f"{about(at.stranded)} lay free in holes of what PyTorch reserved{free}: more than the {said(message.requested)} asked for",
        "no hole was large enough",
    )
    return Judgement(Verdict.FRAGMENTATION, reasons, fragmentation_advice(message))


def _too_much(message: OomMessage, at: Standing) -> Judgement | None:
    if not (message.requested and at.stranded_known and (at.free_known or message.total)):
        return None
    together = at.free + at.stranded
    if together.below(at.requested):
        why = f"all that was free, {about(together)} (holes and the device together), is less than the {said(message.requested)} asked for"
        return Judgement(Verdict.CAPACITY, (why, NO_SETTING), SMALLER)
    return None


def _not_called(message: OomMessage, at: Standing) -> Judgement:
    if not message.requested:
        if at.stranded_known and at.stranded.low >= max(at.live.high or 0, GIB):
            why = f"{about(at.stranded)} lay free in holes, more than was live ({about(at.live)}); what was asked for is not in the text"
            return Judgement(Verdict.FRAGMENTATION, (why,), fragmentation_advice(message))
        return Judgement(Verdict.UNKNOWN, ("the text does not say what was asked for",), WHOLE)
    if at.free_known and not at.free.below(at.requested):
        than = "hardly more than" if at.free.at_least(at.requested) else "about as much as"
        why = (
            f"a close call: the device had {said(message.free)} free, {than} the {said(message.requested)} asked for;"
            " a driver may refuse before the last of it is given"
        )
        advice = ("a slightly smaller batch or sequence, so that the device keeps some room: little was lacking",)
        return Judgement(Verdict.UNKNOWN, (why,), advice)
    if at.stranded_known and at.free_known:
        why = (
            f"a close call: all that was free, {about(at.free + at.stranded)}, and the {said(message.requested)} asked for cannot be told"
            " apart, rounded as they are printed"
        )
        return Judgement(Verdict.UNKNOWN, (why,), SNAPSHOT)
    if at.free_known:
        why = f"{said(message.free)} was free on the device; the text is cut before it says how much lay free in holes"
        return Judgement(Verdict.UNKNOWN, (why,), WHOLE)
    if message.total:
        why = f"the text does not say how much was free: {about(at.total - at.reserved)} of the device are not PyTorch's of this process"
        reasons = (why, "others may hold them, or something limits a single allocation")
        return Judgement(Verdict.UNKNOWN, reasons, ("see at such a moment who else holds memory of the device",))
    return Judgement(Verdict.UNKNOWN, ("the text does not say how much was free",), WHOLE)


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
            f"Process {at.own_pid} is this job itself, seen from inside a container: what it holds fits nowhere else on the device"
        )
    elif at.among_named:
        notes.append("one of the named processes is this job itself, seen from inside a container")
    if message.private_pools and message.private_pools.bytes:
        notes.append(f"{said(message.private_pools)} more lay free in private pools (CUDA graphs), of no use to others")
    outside = Range.of(message.this_process) - at.reserved
    if message.this_process and at.reserved_known and outside.low > 3 * GIB:
        notes.append(f"{about(outside)} of this process are outside PyTorch's allocator (context, NCCL, libraries)")
    return notes
