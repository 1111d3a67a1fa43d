"""The collector's certificates and tokens, by its settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import grpc

from allocscope.collector.admission import Admission
from allocscope.collector.config import CollectorSettings
from allocscope.collector.errors import CredentialsError
from allocscope.collector.tokens import Token, read_tokens
from allocscope.collector.watched import Watched, read, warn_if_open


class GrpcSide:
    """What daemons meet."""

    def __init__(self, settings: CollectorSettings) -> None:
        """CredentialsError: the settings or their files do not fit together."""
        certificate = _pair("grpc", settings.grpc_certificate, settings.grpc_key)
        for name in ("grpc_client_ca", "grpc_tokens_file"):
            if certificate is None and getattr(settings, name) is not None:
                raise CredentialsError(f"{name} goes over TLS only: set grpc_certificate and grpc_key, too")
        self.credentials: grpc.ServerCredentials | None = None
        if certificate is not None:
            self.credentials = _server_credentials(*certificate, settings.grpc_client_ca)
        self.tokens = _tokens("grpc_tokens_file", settings.grpc_tokens_file)
        self._by_certificate = settings.grpc_client_ca is not None

    @property
    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """Who may call."""
        if self.tokens is None and not self._by_certificate:
            return ()
        return (Admission(tokens=self.tokens, by_certificate=self._by_certificate),)


class HttpSide:
    """What people and Prometheus meet."""

    def __init__(self, settings: CollectorSettings) -> None:
        """CredentialsError: the settings or their files do not fit together."""
        pair = _pair("http", settings.http_certificate, settings.http_key)
        self.context = None if pair is None else _renewed_context(*pair)
        self.tokens = _tokens("http_tokens_file", settings.http_tokens_file)

    @property
    def scheme(self) -> str:
        """Of the page's address."""
        return "http" if self.context is None else "https"


def _pair(side: str, certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if (certificate is None) != (key is None):
        raise CredentialsError(f"{side}_certificate and {side}_key belong together, and one of them is not given")
    if certificate is None or key is None:
        return None
    _loaded(certificate, key)
    warn_if_open(f"{side}_key", key)
    return certificate, key


def _loaded(certificate: Path, key: Path) -> ssl.SSLContext:
    read("the certificate", certificate)
    read("the key", key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise CredentialsError(
            f"certificate {certificate} and key {key} are no pair that can be used: {why}"
        ) from error
    return context


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted, and nobody is there to be asked for its password")


def _server_credentials(certificate: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    def configuration() -> grpc.ServerCertificateConfiguration:
        _loaded(certificate, key)
        roots = read("grpc_client_ca", client_ca) if client_ca is not None else None
        if roots is not None and client_ca is not None:
            _check_ca(roots, client_ca)
        pairs = [(read("grpc_key", key), read("grpc_certificate", certificate))]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=roots)

    watched = Watched(configuration, *(path for path in (certificate, key, client_ca) if path is not None))
    return grpc.dynamic_ssl_server_credentials(
        watched.made,
        watched.renewed,  # type: ignore[arg-type]  # None keeps what was, as its documentation says
        require_client_authentication=client_ca is not None,
    )


def _check_ca(roots: bytes, path: Path) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=roots.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise CredentialsError(f"grpc_client_ca {path} holds no certificate that can be read") from error


def _renewed_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Each handshake gets the newest; the callback comes whether a name is asked for or not (SSL_CTX_set_tlsext_servername_callback)."""
    watched = Watched(lambda: _loaded(certificate, key), certificate, key)

    def renew(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        watched.renewed()
        connection.context = watched.made

    first = _loaded(certificate, key)
    first.sni_callback = renew
    return first


def _tokens(name: str, path: Path | None) -> Watched[tuple[Token, ...]] | None:
    if path is None:
        return None
    warn_if_open(name, path)
    return Watched(_reader(name, path), path)


def _reader(name: str, path: Path) -> Callable[[], tuple[Token, ...]]:
    def made() -> tuple[Token, ...]:
        try:
            return read_tokens(read(name, path).decode("utf-8", "replace"))
        except ValueError as error:
            raise CredentialsError(f"{name} {path}: {error}") from error

    return made
