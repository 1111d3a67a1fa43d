"""What keeps a collector from starting.

CollectorError
├── ListenError       an address cannot be had
├── CredentialsError  certificates, keys or tokens cannot be used, or do not fit together
└── AddressesError    the file of addresses cannot be written

Beside these: `allocscope.storage.CannotOpen`, and `allocscope.model.settings.SettingsError`.
"""

from __future__ import annotations

from pathlib import Path


class CollectorError(Exception):
    """The collector cannot start; the text says what, with which value, and what to try."""


class ListenError(CollectorError):
    """An address cannot be had."""

    def __init__(self, what: str, address: str, why: str, flag: str) -> None:
        super().__init__(
            f"cannot serve {what} on {address}: {why} ({flag} names another; is a collector running already?)"
        )
        self.address, self.why = address, why


class CredentialsError(CollectorError):
    """Certificates, keys or tokens cannot be used, or do not fit together."""


class AddressesError(CollectorError):
    """The file of addresses cannot be written."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot write {path}: {why} (--addresses-file names another)")
        self.path = path
