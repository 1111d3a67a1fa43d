"""The place of this process among torch.distributed's ranks, where the job has initialised it: a look at Python's state, no call to anybody."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from allocscope.probe.launchers import Place, is_possible, natural


def world_of_torch(modules: Mapping[str, Any] | None = None) -> Place | None:
    """Rank and world size of the default process group; None: there is none now."""
    found = sys.modules if modules is None else modules
    names = getattr(found.get("torch.distributed"), "__dict__", {})
    is_initialized, get_rank, get_world_size = map(names.get, ("is_initialized", "get_rank", "get_world_size"))
    if is_initialized is None or get_rank is None or get_world_size is None:  # a torch without it, or half imported
        return None
    try:
        if not is_initialized():
            return None
        place = Place(natural(get_rank()), natural(get_world_size()))
    except Exception:  # noqa: BLE001 (the job may end the group this very moment, by whatever error)
        return None
    return place if is_possible(place) and None not in place[:2] else None
