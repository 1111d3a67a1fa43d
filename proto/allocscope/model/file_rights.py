"""Who may get at a file with a secret in it."""

from __future__ import annotations


def too_open(mode: int) -> str | None:
    """What is wrong with a secret file's permission bits; None: nothing. A group may read it: that is how services are given theirs."""
    if mode & 0o022:
        return f"others than its owner may write to it (mode {mode & 0o777:04o}; chmod 0640)"
    if mode & 0o004:
        return f"every user may read it (mode {mode & 0o777:04o}; chmod 0640)"
    return None
