"""Why there is no connection to the collector: gRPC says it in the words of its parts, if at all; a handshake by Python's ssl tells.

`allocscope doctor` asks the same.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from pathlib import Path

from allocscope.daemon.collector_way import CollectorWay
from allocscope.daemon.errors import CredentialsError

WITHIN_S = 3.0
EXPIRED, NOT_YET, OTHER_NAME = 10, 9, (62, 64)
"""X509_V_ERR_CERT_HAS_EXPIRED and others (OpenSSL's x509_vfy.h)."""
REFUSALS = {
    "CERTIFICATE_REQUIRED": "it takes only daemons with a certificate (collector_certificate, collector_key)",
    "HANDSHAKE_FAILURE": "it takes only daemons with a certificate (collector_certificate, collector_key)",
    "UNKNOWN_CA": "it does not know the CA of this daemon's certificate {certificate} (its grpc_client_ca)",
    "CERTIFICATE_EXPIRED": "this daemon's certificate {certificate} has expired",
    "BAD_CERTIFICATE": "it does not take this daemon's certificate {certificate}",
    "CERTIFICATE_UNKNOWN": "it does not take this daemon's certificate {certificate}",
    "WRONG_VERSION_NUMBER": "it does not speak TLS, and this daemon does (collector_ca, collector_tls)",
}
"""By the end of OpenSSL's reason: alerts of the other side, and what is no TLS."""


def trouble(way: CollectorWay, within_s: float = WITHIN_S) -> str | None:
    """What is wrong with TLS to the collector, for people; None: nothing, or it is not TLS. Waits for at most about that long."""
    host, _, port = way.address.rpartition(":")
    try:
        context = way.context() if way.is_tls else _trusting()
        with socket.create_connection((host.strip("[]"), int(port)), within_s) as connection:
            connection.settimeout(within_s)
            return _shake_hands(way, context, connection)
    except CredentialsError as error:
        return str(error)
    except OSError:  # nobody listens there, or nothing gets there: gRPC tells that well
        return None


def _shake_hands(way: CollectorWay, context: ssl.SSLContext, connection: socket.socket) -> str | None:
    try:
        with context.wrap_socket(connection, server_hostname=way.host()) as secure:
            if not way.is_tls:
                return "it speaks TLS, and this daemon does not (collector_ca, or collector_tls)"
            if not secure.recv(1):  # in TLS 1.3 what it thinks of our certificate comes only now
                return _hung_up(way)
    except ssl.SSLCertVerificationError as error:
        return _of_its_certificate(way, error)
    except ssl.SSLError as error:
        if not way.is_tls:
            return None
        return _of_ours(way, error.reason or "")
    return None


def _of_its_certificate(way: CollectorWay, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == EXPIRED:
        return "its certificate has expired"
    if error.verify_code == NOT_YET:
        return "its certificate is not valid yet, by this machine's clock"
    if error.verify_code in OTHER_NAME:
        return f"its certificate is not for {way.host()!r} (collector_server_name says another name)"
    trusted = f"a CA in {way.ca}" if way.ca is not None else "a CA that this machine trusts (collector_ca)"
    return f"its certificate is not of {trusted}: {error.verify_message}"


def _of_ours(way: CollectorWay, reason: str) -> str | None:
    for end, text in REFUSALS.items():
        if reason.endswith(end):
            return text.format(certificate=way.certificate)
    return f"no TLS with it: {reason}" if reason else None


def _hung_up(way: CollectorWay) -> str:
    """A server of gRPC's sends no alert when a certificate does not please it."""
    if way.certificate is None or way.key is None:
        return REFUSALS["CERTIFICATE_REQUIRED"]
    if _has_expired(way.certificate, way.key):
        return REFUSALS["CERTIFICATE_EXPIRED"].format(certificate=way.certificate)
    return f"it hung up when it saw this daemon's certificate {way.certificate}: is it of a CA in its grpc_client_ca?"


def _has_expired(certificate: Path, key: Path) -> bool:
    """By a handshake with ourselves, since Python's ssl reads dates nowhere else."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    server.load_verify_locations(certificate)
    for context in (server, client):
        context.load_cert_chain(certificate, key)
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # in which it is over once both are content
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    try:
        for _ in range(4):
            for side in sides:
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_code == EXPIRED
    except ssl.SSLError:
        return False
    return False


def _trusting() -> ssl.SSLContext:
    """To see whether it speaks TLS at all; nothing is sent."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
