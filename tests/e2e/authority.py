"""Certificates and tokens as files, made fresh for a test."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import trustme

EXPIRED = datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 1, 2, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path
    serial: int


class Authority:
    """A CA, and what it issues, in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._ca = folder, trustme.CA()
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, *names: str, expired: bool = False, common_name: str | None = None) -> Pair:
        """For these names; files of an earlier one of this name are replaced."""
        began, ended = EXPIRED if expired else (None, None)
        issued = self._ca.issue_cert(*names, common_name=common_name, not_before=began, not_after=ended)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        for path, pems in ((key, [issued.private_key_pem]), (certificate, issued.cert_chain_pems)):
            draft = path.with_suffix(".new")
            draft.write_bytes(b"".join(pem.bytes() for pem in pems))
            draft.chmod(0o600)
            draft.replace(path)
        return Pair(certificate, key, serial_of(certificate.read_bytes()))

    def secret(self, name: str, text: str) -> Path:
        """A file that only its owner reads."""
        path = self.folder / name
        draft = path.with_suffix(".new")
        draft.write_text(text)
        draft.chmod(0o600)
        draft.replace(path)
        return path


def serial_of(pem: bytes) -> int:
    """Of a certificate."""
    from cryptography import x509

    return x509.load_pem_x509_certificate(pem).serial_number
