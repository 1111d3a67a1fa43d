"""What a moment comes to, where no failure says so: two sentences."""

from __future__ import annotations

from allocscope.allocator.diagnosis.holes import hole_count, largest_holes
from allocscope.allocator.diagnosis.moment import Moment
from allocscope.model import Line
from allocscope.model.figures import percent, size

MUCH, LITTLE = 4, 20
"""Stranded is much from one part in so many of what is reserved on, little below one in so many."""


def much_stranded(moment: Moment) -> bool:
    """Do holes that cannot be given back hold a notable part, a quarter or more, of the bytes reserved?

    Of a moment of PyTorch 1.13 to 2.14. Raises nothing.
    """
    return 0 < moment.reserved_bytes <= moment.bytes_of(Line.STRANDED) * MUCH


def picture_of(moment: Moment) -> tuple[str, ...]:
    """How much is live, how much is free and in which way, and what to think of it; empty where nothing is reserved.

    Each size is told with its unit. Of a moment of PyTorch 1.13 to 2.14. Raises nothing.
    """
    if not moment.reserved_bytes:
        return ()
    return (_shares(moment), _opinion(moment))


def _shares(moment: Moment) -> str:
    told = [f"{size(moment.allocated_bytes)} of {size(moment.reserved_bytes)} reserved are live"]
    if waiting := moment.bytes_of(Line.AWAITING_FREE):
        told.append(f"{size(waiting)} were freed, but wait for another stream")
    if releasable := moment.bytes_of(Line.RELEASABLE):
        told.append(f"{size(releasable)} are free, and empty_cache would give them back")
    if stranded := moment.bytes_of(Line.STRANDED):
        told.append(f"{size(stranded)} lie stranded in {_holes(moment)}")
    if private := moment.bytes_of(Line.PRIVATE):
        told.append(f"{size(private)} are kept free by private pools")
    return f"{'; '.join(told)}."


def _holes(moment: Moment) -> str:
    """Of expandable segments they are not counted: whole pages of such a hole can be given back."""
    if any(segment.is_expandable for segment in moment.segments):
        return "holes"
    count = hole_count(moment.segments)
    return "1 hole" if count == 1 else f"{count:,} holes"


def _opinion(moment: Moment) -> str:
    stranded = moment.bytes_of(Line.STRANDED)
    share = percent(stranded / moment.reserved_bytes)
    if much_stranded(moment):
        largest = max((hole.size for hole in largest_holes(moment.segments, 1)), default=0)
        return (
            f"Much is stranded, {share} of what is reserved: no hole can serve a request larger than {size(largest)}."
        )
    if stranded * LITTLE >= moment.reserved_bytes:
        return (
            f"Some is stranded, {share} of what is reserved: worth watching, if it grows while the live bytes do not."
        )
    if moment.bytes_of(Line.PRIVATE) * MUCH >= moment.reserved_bytes:
        return f"Little is stranded ({share}), but what private pools keep free serves nobody else."
    return f"A healthy cache: little is stranded ({share})."
