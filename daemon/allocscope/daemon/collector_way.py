"""The way to the collector: in the clear, or by TLS, with this daemon's certificate or token where they are given.

The files are read for each connection, so that those that are exchanged while the daemon runs are used from the next one on.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from allocscope.daemon.config import DaemonSettings
from allocscope.daemon.errors import CredentialsError
from allocscope.model.file_rights import too_open

Options = Sequence[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class CollectorWay:
    """How to get there."""

    address: str
    """HOST:PORT."""
    is_tls: bool = False
    ca: Path | None = None
    """Of the collector's certificate; None: what this machine trusts."""
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    server_name: str | None = None
    """The name in the collector's certificate, where it is not the address's host."""

    @classmethod
    def of(cls, settings: DaemonSettings) -> CollectorWay:
        """By the settings, their files read once; CredentialsError says what is wrong with them."""
        is_tls = settings.collector_tls or settings.collector_ca is not None
        way = cls(
            settings.collector,
            is_tls,
            settings.collector_ca,
            settings.collector_certificate,
            settings.collector_key,
            settings.collector_token_file,
            settings.collector_server_name,
        )
        way.check()
        return way

    def check(self) -> None:
        """CredentialsError: the settings or their files do not fit together."""
        if (self.certificate is None) != (self.key is None):
            raise CredentialsError(
                "collector_certificate and collector_key belong together, and one of them is not given"
            )
        if not self.is_tls:
            given = {
                "collector_certificate": self.certificate,
                "collector_token_file": self.token_file,
                "collector_server_name": self.server_name,
            }
            alone = [name for name, value in given.items() if value is not None]
            if alone:
                remedy = "set collector_ca, or collector_tls where its certificate is of a public CA"
                raise CredentialsError(f"{alone[0]} goes over TLS only: {remedy}")
            return
        self.context()
        self._token()

    def warnings(self) -> tuple[str, ...]:
        """Secrets that are open to others."""
        found = []
        for name, path in (("collector_key", self.key), ("collector_token_file", self.token_file)):
            wrong = too_open(path.stat().st_mode) if path is not None else None
            if wrong:
                found.append(f"{name} {path}: {wrong}")
        return tuple(found)

    def host(self) -> str:
        """What the collector's certificate must name."""
        return self.server_name or self.address.rpartition(":")[0].strip("[]")

    def open(self, options: Options) -> grpc.aio.Channel:
        """A channel of gRPC's asyncio side; CredentialsError: a file cannot be read now."""
        if not self.is_tls:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, self._credentials(), options=self._named(options))

    def open_blocking(self, options: Options) -> grpc.Channel:
        """A channel of gRPC's threads; CredentialsError: a file cannot be read now."""
        if not self.is_tls:
            return grpc.insecure_channel(self.address, options=options)
        return grpc.secure_channel(self.address, self._credentials(), options=self._named(options))

    def context(self) -> ssl.SSLContext:
        """The same for Python's ssl, which says what is wrong; CredentialsError."""
        made = ssl.create_default_context(cafile=None)
        made.set_alpn_protocols(["h2"])
        try:
            if self.ca is not None:
                made = ssl.create_default_context(cadata=_read("collector_ca", self.ca).decode("ascii", "replace"))
                made.set_alpn_protocols(["h2"])
        except ssl.SSLError as error:
            raise CredentialsError(f"collector_ca {self.ca} holds no certificate that can be read") from error
        if self.certificate is not None and self.key is not None:
            _read("collector_certificate", self.certificate)
            _read("collector_key", self.key)
            try:
                made.load_cert_chain(self.certificate, self.key, password=_no_password)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise CredentialsError(
                    f"collector_certificate {self.certificate} and collector_key {self.key} are no pair that can be used: "
                    f"{getattr(error, 'reason', None) or error}"
                ) from error
        return made

    def _credentials(self) -> grpc.ChannelCredentials:
        chain = key = None
        if self.certificate is not None and self.key is not None:
            self.context()  # gRPC says of a key that does not fit no more than that there is no connection
            chain, key = _read("collector_certificate", self.certificate), _read("collector_key", self.key)
        credentials = grpc.ssl_channel_credentials(self._roots(), key, chain)
        token = self._token()
        if token is None:
            return credentials
        return grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))

    def _roots(self) -> bytes | None:
        if self.ca is not None:
            return _read("collector_ca", self.ca)
        trusted = ssl.get_default_verify_paths().cafile  # without it gRPC has a list of its own
        return Path(trusted).read_bytes() if trusted and Path(trusted).is_file() else None

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        token = _read("collector_token_file", self.token_file).decode("ascii", "replace").strip()
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise CredentialsError(
                f"collector_token_file {self.token_file} must hold one token, of printable ASCII without spaces"
            )
        return token

    def _named(self, options: Options) -> Options:
        if self.server_name is None:
            return options
        return [*options, ("grpc.ssl_target_name_override", self.server_name)]


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {name} {path}: {error.strerror or error}") from error


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted, and nobody is there to be asked for its password")
