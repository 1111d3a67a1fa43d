"""Reasons and advice in words, and amounts as PyTorch prints them."""

from __future__ import annotations

from collections import Counter

from allocscope.allocator.messages.figures import Figure, Range
from allocscope.allocator.messages.message import OomMessage
from allocscope.allocator.messages.standing import GIB, MIB, Standing

SMALLER = ("a smaller batch or sequence, activation checkpointing, a sharded optimizer or model, offloading",)
WHOLE = ("find the text where it was first written, whole: the log of the process itself, before it was copied or cut",)
SNAPSHOT = ("take a snapshot of such a moment: allocscope inspect tells to the byte",)
NO_SETTING = "no setting of the allocator would have made room"


def fragmentation_advice(message: OomMessage) -> tuple[str, ...]:
    """What helps against holes on this kind of device, as far as it is not on already."""
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


def others_hold(at: Standing) -> str:
    """Who holds what would have been enough."""
    if at.others_named.low * 2 >= at.others.low:
        return f"other processes hold {about(at.others_named)} of the device, without which it would have fitted"
    return (
        f"{about(at.others)} of the device are neither free nor this process's, without which it would have fitted:"
        " other processes (of other containers too), or the host where memory is shared with it"
    )


def others_advice(message: OomMessage, at: Standing) -> tuple[str, ...]:
    """What to do about them."""
    named = [p for p in message.other_processes if p.pid != at.own_pid]
    alike = Counter(p.used for p in named if p.used and p.used.high_bytes < 2 * GIB).most_common(1)
    if alike and alike[0][1] >= 3:
        used, count = alike[0]
        return (
            (
                f"{count} processes with the same {said(used)} look like other ranks' contexts on this device:"
                " call torch.cuda.set_device(local_rank) before anything else touches CUDA, and load checkpoints with map_location"
            ),
        )
    pids = ", ".join(str(p.pid) for p in named[:4])
    return (
        f"see who they are (pid {pids})" if pids else "see who holds it: nvidia-smi on the host, not in the container",
    )


def said(figure: Figure | None) -> str:
    """A figure as it is printed in the message."""
    return "an unknown amount" if figure is None else amount(figure.bytes)


def about(between: Range) -> str:
    """A range in a word: its middle, `about` where it is wide, `at least` where it has no end."""
    if between.high is None:
        return f"at least {amount(between.low)}"
    middle = amount((between.low + between.high) // 2)
    return middle if between.high - between.low <= max(between.low // 50, MIB // 50) else f"about {middle}"


def amount(amount_bytes: int) -> str:
    """As PyTorch prints it in the texts that are quoted or made after it: `17.20 GiB`, `1024.00 MiB` (`allocscope.model.figures`: `1.00 GiB`)."""
    for step, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if amount_bytes > step:
            return f"{amount_bytes / step:.2f} {unit}"
    return f"{amount_bytes} bytes"
