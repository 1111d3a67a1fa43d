"""From job to collector by TLS: who is let in, as whom, and what is said to who is not. Real processes, real handshakes."""

from __future__ import annotations

import base64
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from allocscope.daemon.collector_trouble import trouble
from allocscope.daemon.collector_way import CollectorWay
from allocscope.proto.v1.capture_service_pb2 import CaptureHello, KeepRequest
from allocscope.proto.v1.collector_service_pb2 import IngestRequest, NodeHello
from tests.collector.harness import CollectorProcess, collector
from tests.daemon.capture_fakes import dead_process, folder_of, leave_whole, note
from tests.daemon.fakes import WAIT_S, DaemonProcess, FakeProbe, process, sample
from tests.e2e.authority import Authority, Pair, serial_of
from tests.e2e.processes import until

pytestmark = pytest.mark.end_to_end

TOKEN, OTHERS_TOKEN = "t" * 32, "o" * 32
SERVER = ("localhost", "127.0.0.1")


class Secured:
    """A collector that asks for everything, and what is needed to be let in."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "ca")
        self.server, self.node = self.authority.issue("server", *SERVER), self.authority.issue("node", "node-1")
        self.tokens = self.authority.secret("tokens", f"# tokens\n{TOKEN}  node-1 spare-*\n{OTHERS_TOKEN} node-2\n")
        self.token = self.authority.secret("token", TOKEN + "\n")
        self.flags = (
            *("--grpc-certificate", str(self.server.certificate), "--grpc-key", str(self.server.key)),
            *("--grpc-client-ca", str(self.authority.ca), "--grpc-tokens-file", str(self.tokens)),
            *("--http-certificate", str(self.server.certificate), "--http-key", str(self.server.key)),
            *("--http-tokens-file", str(self.tokens)),
        )

    def daemon(self, **settings: object) -> dict[str, object]:
        """What a daemon that is let in is told."""
        return {
            "collector_ca": self.authority.ca,
            "collector_certificate": self.node.certificate,
            "collector_key": self.node.key,
            "collector_token_file": self.token,
            **settings,
        }

    def get(self, process: CollectorProcess, path: str, **more) -> httpx.Response:
        trusting = ssl.create_default_context(cafile=str(self.authority.ca))
        given = {"headers": {"Authorization": f"Bearer {TOKEN}"}, **more}
        return httpx.get(f"https://{process.http}{path}", verify=trusting, timeout=WAIT_S, **given)


@pytest.fixture(scope="module")
def secured() -> Iterator[tuple[Secured, CollectorProcess]]:
    with tempfile.TemporaryDirectory(prefix="as-") as name:
        made = Secured(Path(name))
        with collector(Path(name), *made.flags) as process:
            yield made, process


@pytest.fixture
def folder() -> Iterator[Path]:
    """A socket's path is short or impossible."""
    with tempfile.TemporaryDirectory(prefix="as-") as name:
        yield Path(name)


def presented(address: str, made: Secured) -> int:
    """The serial number of the certificate that is shown there now."""
    context = ssl.create_default_context(cafile=str(made.authority.ca))
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), WAIT_S) as raw,
        context.wrap_socket(raw, server_hostname=host) as line,
    ):
        shown = line.getpeercert(binary_form=True)
    assert shown
    return serial_of(ssl.DER_cert_to_PEM_cert(shown).encode())


# what works


def test_samples_and_captures_go_by_mutual_tls_with_a_token(secured, folder):
    made, process_ = secured
    with DaemonProcess(folder, process_.grpc, **made.daemon()) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1), sample(2))
        probe.wait_acknowledged(2)
        leave_whole(folder_of(daemon), note(dead_process("b")), b"snapshot")
        until(lambda: made.get(process_, "/api/v1/jobs/train").json().get("allocators"), "the samples")
        kept = until(lambda: made.get(process_, "/api/v1/captures").json()["items"], "the capture")
        assert [capture["capture_id"] for capture in kept] == ["c" * 32]
        assert daemon.wait_log("collector connected")["address"] == process_.grpc
        probe.end()
        assert not [line for line in daemon.log if line.get("level") in ("warning", "error")]


# what does not, and what is said


REFUSED = [
    pytest.param(
        lambda made, other: {"collector_ca": other.ca},
        lambda made, other: f"its certificate is not of a CA in {other.ca}: ",
        id="a collector of another CA",
    ),
    pytest.param(
        lambda made, other: {"collector_server_name": "elsewhere"},
        lambda made, other: "its certificate is not for 'elsewhere' (collector_server_name says another name)",
        id="a collector of another name",
    ),
    pytest.param(
        lambda made, other: {"collector_certificate": "", "collector_key": ""},
        lambda made, other: "it takes only daemons with a certificate (collector_certificate, collector_key)",
        id="no certificate",
    ),
    pytest.param(
        lambda made, other: pair(other.issue("node", "node-1")),
        lambda made, other: (
            f"it hung up when it saw this daemon's certificate {other.folder}/node.pem:"
            " is it of a CA in its grpc_client_ca?"
        ),
        id="a certificate of another CA",
    ),
    pytest.param(
        lambda made, other: pair(made.authority.issue("old", "node-1", expired=True)),
        lambda made, other: f"this daemon's certificate {made.authority.folder}/old.pem has expired",
        id="a certificate that has expired",
    ),
    pytest.param(
        lambda made, other: pair(made.authority.issue("second", "node-2", common_name="spare-1")),
        lambda made, other: (
            "PERMISSION_DENIED: the certificate is not for node 'node-1', but for node-2, spare-1;"
            " issue one that names the node, or set the daemon's `node`"
        ),
        id="another node's certificate",
    ),
    pytest.param(
        lambda made, other: {"collector_token_file": ""},
        lambda made, other: "UNAUTHENTICATED: a token is asked for (the daemon's collector_token_file)",
        id="no token",
    ),
    pytest.param(
        lambda made, other: {"collector_token_file": other.secret("wrong", "x" * 32)},
        lambda made, other: "UNAUTHENTICATED: the token is none that is known here",
        id="a wrong token",
    ),
    pytest.param(
        lambda made, other: {"collector_token_file": other.secret("others", OTHERS_TOKEN)},
        lambda made, other: "PERMISSION_DENIED: the token is not for node 'node-1', but for node-2",
        id="another node's token",
    ),
    pytest.param(
        lambda made, other: {
            "collector_ca": "",
            "collector_certificate": "",
            "collector_key": "",
            "collector_token_file": "",
        },
        lambda made, other: "it speaks TLS, and this daemon does not (collector_ca, or collector_tls)",
        id="no TLS",
    ),
]


def pair(issued: Pair) -> dict[str, object]:
    return {"collector_certificate": issued.certificate, "collector_key": issued.key}


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_a_daemon_that_is_not_let_in_says_why_and_spools(secured, folder, changes, why):
    made, process_ = secured
    other = Authority(folder / "other")
    settings = {name: value for name, value in made.daemon(**changes(made, other)).items() if value}
    with DaemonProcess(folder, process_.grpc, **settings) as daemon:
        line = daemon.wait_log(
            "nothing goes to the collector", why(made, other)
        )  # a busy machine's handshake may fail before
        assert line["level"] == "error"
        probe = FakeProbe(daemon.socket, process("d"))
        probe.samples(sample(1))
        probe.wait_acknowledged(1)  # it is in the spool
        assert daemon.figures("allocscope_spool_batches")["allocscope_spool_batches"] > 0
        probe.end()
    assert "d" * 32 not in made.get(process_, "/api/v1/jobs/train").text


METHODS = [
    pytest.param(
        "CollectorService/Ingest", IngestRequest(hello=NodeHello(node="node-2", daemon_id="d" * 32)), id="batches"
    ),
    pytest.param(
        "CollectorService/Backfill", IngestRequest(hello=NodeHello(node="node-2", daemon_id="d" * 32)), id="late ones"
    ),
    pytest.param("CaptureService/Keep", KeepRequest(hello=CaptureHello(node="node-2")), id="captures"),
]


@pytest.mark.parametrize(("method", "hello"), METHODS)
def test_each_way_in_is_closed_to_who_speaks_for_another_node(secured, method, hello):
    made, process_ = secured
    known = CollectorWay(process_.grpc, True, made.authority.ca, made.node.certificate, made.node.key, made.token)
    other = replace(known, token_file=made.authority.secret("other-token", OTHERS_TOKEN))
    nobody = replace(known, token_file=None)
    remedy = "issue one that names the node, or set the daemon's `node`"
    assert [ended(way, method, hello) for way in (nobody, known, other)] == [
        "UNAUTHENTICATED: a token is asked for (the daemon's collector_token_file)",
        "PERMISSION_DENIED: the token is not for node 'node-2', but for node-1, spare-*",
        f"PERMISSION_DENIED: the certificate is not for node 'node-2', but for node-1; {remedy}",
    ]


def ended(way: CollectorWay, method: str, hello: IngestRequest | KeepRequest) -> str:
    """How a call ends that begins so."""
    with way.open_blocking([]) as channel:
        begin: Any = channel.stream_stream(f"/allocscope.proto.v1.{method}", None, None)
        call = begin(iter([hello.SerializeToString()]))
        with suppress(grpc.RpcError):
            list(call)
        return f"{call.code().name}: {call.details()}"


@contextmanager
def serving(issued: Pair | None) -> Iterator[str]:
    """A gRPC server without any service; None: not by TLS."""
    server = grpc.server(ThreadPoolExecutor(2))
    if issued is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        credentials = grpc.ssl_server_credentials([(issued.key.read_bytes(), issued.certificate.read_bytes())])
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_what_is_wrong_with_the_collectors_side_is_told(folder):
    authority = Authority(folder)
    with serving(authority.issue("old", *SERVER, expired=True)) as address:
        assert trouble(CollectorWay(address, is_tls=True, ca=authority.ca)) == "its certificate has expired"
    with serving(None) as address:
        text = "it does not speak TLS, and this daemon does (collector_ca, collector_tls)"
        assert trouble(CollectorWay(address, is_tls=True, ca=authority.ca)) == text
        assert trouble(CollectorWay(address)) is None
    with serving(authority.issue("good", *SERVER)) as address:
        assert trouble(CollectorWay(address, is_tls=True, ca=authority.ca)) is None
        trusted = trouble(CollectorWay(address, is_tls=True))
        assert trusted
        assert trusted.startswith("its certificate is not of a CA that this machine trusts (collector_ca): ")


# what is exchanged while both run


def test_certificates_and_tokens_may_be_exchanged_while_everything_runs(folder):
    made = Secured(folder)
    stale = made.authority.issue("node", "node-1", expired=True)
    with collector(folder, *made.flags) as process_:
        before = presented(process_.grpc, made), presented(process_.http, made)
        assert before == (made.server.serial, made.server.serial)
        with DaemonProcess(folder, process_.grpc, **made.daemon()) as daemon:
            why = f"this daemon's certificate {stale.certificate} has expired"
            told = daemon.wait_log("nothing goes to the collector", why)
            probe = FakeProbe(daemon.socket, process())
            probe.samples(sample(1))
            probe.wait_acknowledged(1)

            made.authority.issue("node", "node-1")
            daemon.wait_log("collector connected")
            until(lambda: made.get(process_, "/api/v1/jobs").json()["items"], "the job")
            assert [line.get("why") for line in daemon.log].count(told["why"]) == 1

            renewed = made.authority.issue("server", *SERVER)
            made.authority.secret("tokens", f"{'n' * 32}\n")
            assert (presented(process_.grpc, made), presented(process_.http, made)) == (renewed.serial, renewed.serial)
            assert made.get(process_, "/api/v1/jobs").status_code == 401
            assert made.get(process_, "/api/v1/jobs", headers={"Authorization": f"Bearer {'n' * 32}"}).is_success

            made.server.key.write_text("half a ke")
            assert presented(process_.grpc, made) == renewed.serial
            process_.wait_until_said("what was exchanged cannot be used; what was before goes on")
            probe.samples(sample(2))  # the stream that was there before goes on
            probe.wait_acknowledged(2)
            until(lambda: daemon.figures("allocscope_spool_batches")["allocscope_spool_batches"] == 0, "all is there")
            probe.end()


# whoever asks


def test_the_page_and_the_api_ask_for_a_token_and_health_does_not(secured):
    made, process_ = secured
    nothing: dict[str, str] = {}
    for path in ("/", "/metrics", "/api/v1/jobs", "/sd/prometheus", "/static/app.js", "/openapi.json"):
        refused = made.get(process_, path, headers=nothing)
        assert (path, refused.status_code, refused.json()["error"]["code"]) == (path, 401, "unauthenticated")
        assert refused.headers["www-authenticate"].startswith("Basic ")
    for path in ("/healthz", "/readyz"):
        assert made.get(process_, path, headers=nothing).json() == {"status": "ok"}
    wrong = made.get(process_, "/api/v1/jobs", headers={"Authorization": "Bearer " + "x" * 32})
    assert wrong.status_code == 401
    basic = base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
    assert made.get(process_, "/", headers={"Authorization": f"Basic {basic}"}).status_code == 200
    assert made.get(process_, "/metrics").status_code == 200


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allocscope.cli", "jobs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_the_commands_ask_by_https_with_a_token(secured):
    made, process_ = secured
    url, ca, token = f"https://{process_.http}", str(made.authority.ca), str(made.token)
    assert ask("--url", url, "--ca", ca, "--token-file", token, "--json").returncode == 0
    untrusted = ask("--url", url, "--token-file", token)
    assert untrusted.returncode == 1
    assert untrusted.stderr.startswith(f"allocscope: the certificate of {url} is not trusted (")
    assert untrusted.stderr.endswith("; name its CA with --ca or ALLOCSCOPE_CA\n")
    closed = ask("--url", url, "--ca", ca)
    assert closed.stderr == f"allocscope: {url} asks for a token that it knows: --token-file or ALLOCSCOPE_TOKEN_FILE\n"
    absent = ask("--url", url, "--ca", ca, "--token-file", "/no/such")
    assert absent.stderr == "allocscope: cannot read the token in /no/such: No such file or directory\n"


# what keeps them from starting


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (
            "daemon --collector-certificate {}/node.pem",
            "collector_certificate and collector_key belong together, and one of them is not given",
        ),
        (
            "daemon --collector-token-file {}/token",
            "collector_token_file goes over TLS only: set collector_ca, or collector_tls where its certificate is of a public CA",
        ),
        (
            "daemon --collector-ca {}/none.pem",
            "cannot read collector_ca {}/none.pem: No such file or directory",
        ),
        (
            "daemon --collector-ca {}/token",
            "collector_ca {}/token holds no certificate that can be read",
        ),
        (
            "daemon --collector-ca {}/ca.pem --collector-certificate {}/node.pem --collector-key {}/server.key",
            "collector_certificate {}/node.pem and collector_key {}/server.key are no pair that can be used: KEY_VALUES_MISMATCH",
        ),
        (
            "daemon --collector-ca {}/ca.pem --collector-token-file {}/ca.pem",
            "collector_token_file {}/ca.pem must hold one token, of printable ASCII without spaces",
        ),
        (
            "collector --grpc-certificate {}/server.pem",
            "grpc_certificate and grpc_key belong together, and one of them is not given",
        ),
        (
            "collector --http-key {}/server.key",
            "http_certificate and http_key belong together, and one of them is not given",
        ),
        (
            "collector --grpc-tokens-file {}/token",
            "grpc_tokens_file goes over TLS only: set grpc_certificate and grpc_key, too",
        ),
        (
            "collector --grpc-certificate {}/server.pem --grpc-key {}/node.key",
            "certificate {}/server.pem and key {}/node.key are no pair that can be used: KEY_VALUES_MISMATCH",
        ),
        (
            "collector --grpc-certificate {}/server.pem --grpc-key {}/server.key --grpc-client-ca {}/token",
            "grpc_client_ca {}/token holds no certificate that can be read",
        ),
        (
            "collector --http-tokens-file {}/short",
            "http_tokens_file {}/short: line 1: a token has at least 16 letters, all of printable ASCII",
        ),
        (
            "collector --http-tokens-file {}/empty",
            "http_tokens_file {}/empty: there is no token in it",
        ),
    ],
)
def test_what_does_not_fit_together_is_a_clear_error_at_the_start(tmp_path, command, text):
    authority = Authority(tmp_path)
    authority.issue("server", *SERVER)
    authority.issue("node", "node-1")
    for name, secret in (("token", TOKEN), ("short", "abc"), ("empty", "# none\n")):
        authority.secret(name, secret)
    places = {
        "daemon": ("--socket", "{}/s", "--spool", "{}/spool", "--metrics-listen", "127.0.0.1:0"),
        "collector": ("--database", "sqlite:///{}/db", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"),
    }
    service, *settings = command.split()
    arguments = [part.replace("{}", str(tmp_path)) for part in (service, *places[service], *settings)]
    run = [sys.executable, "-m", "allocscope.cli", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=3 * WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (1, f"allocscope {service}: {text.replace('{}', str(tmp_path))}\n")


def test_a_secret_that_is_open_to_others_is_told_of(folder):
    authority = Authority(folder)
    authority.issue("node", "node-1")
    token = authority.secret("token", TOKEN)
    token.chmod(0o644)
    with DaemonProcess(folder, collector_ca=authority.ca, collector_token_file=token) as daemon:
        told = daemon.wait_log("a secret is open to others")
        assert told["file"] == f"collector_token_file {token}: every user may read it (mode 0644; chmod 0640)"
