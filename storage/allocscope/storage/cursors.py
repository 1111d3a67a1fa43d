"""Where a page ended, as an opaque word."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import TypeVar

from allocscope.storage.errors import BadCursor

Key = TypeVar("Key", int, str)


def cursor_at(listed: str, key: int | str) -> str:
    """Marks an item of a list by its key there."""
    return urlsafe_b64encode(json.dumps([listed, key]).encode()).decode().rstrip("=")


def key_at(cursor: str, listed: str, kind: type[Key]) -> Key:
    """The key that `cursor_at` was given for this list."""
    found: object
    key: Key
    try:
        found, key = json.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, RecursionError) as error:  # not base64, not JSON, not a pair
        raise BadCursor(cursor) from error
    if found != listed or type(key) is not kind or not _can_be_asked_for(key):
        raise BadCursor(cursor)
    return key


def _can_be_asked_for(key: int | str) -> bool:
    return isinstance(key, str) or 0 <= key < 2**63
