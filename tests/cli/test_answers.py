"""What answers instead of a collector, or as one of another version, is told in a line; no question ends in a traceback, or never."""

from __future__ import annotations

import re

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Response

from allocscope.cli.app import main

ANY_PATH = re.compile("/.*")
QUESTIONS = (
    ["jobs"],
    ["risks"],
    ["devices"],
    ["alerts"],
    ["bill", "x"],
    ["advise", "x"],
    ["advise", "x", "--fresh"],
    ["capture", "x"],
    ["capture", "--list"],
    ["capture", "--id", "x"],
)

NO_COLLECTOR = [
    pytest.param(Response("<html>", 200), "what it answers is no JSON)", id="a page"),
    pytest.param(Response("", 200), "what it answers is no JSON)", id="nothing"),
    pytest.param(Response(bytes(range(256)), 200), "what it answers is no JSON)", id="bytes"),
    pytest.param(Response("[" * 200_000, 200), "what it answers is no JSON)", id="a deep one"),
    pytest.param(Response("[]", 200), "what it answers is no JSON object)", id="a list"),
    pytest.param(Response("null", 200), "what it answers is no JSON object)", id="null"),
    pytest.param(Response("no", 401), "401 Unauthorized)", id="a proxy's 401"),
    pytest.param(Response("no", 403), "403 Forbidden)", id="403"),
    pytest.param(Response("", 302, {"location": "/login"}), "302 Found)", id="elsewhere"),
    pytest.param(Response("oops", 500), "500 Internal Server Error)", id="500"),
    pytest.param(Response('{"error": "x"}', 404), "404 Not Found)", id="another API"),
    pytest.param(Response("[1]", 404), "404 Not Found)", id="a list of errors"),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=" ".join)
@pytest.mark.parametrize(("response", "why"), NO_COLLECTOR)
def test_what_is_no_collector_is_told_and_how_to_name_one(
    httpserver: HTTPServer, capsys: pytest.CaptureFixture[str], question: list[str], response: Response, why: str
) -> None:
    httpserver.expect_request(ANY_PATH).respond_with_response(response)
    assert main([*question, "--url", httpserver.url_for("/")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"allocscope: {httpserver.url_for('/')} answers, and not as a collector does ({why}; "
        "name one with --url or ALLOCSCOPE_URL\n"
    )


@pytest.mark.parametrize("question", QUESTIONS, ids=" ".join)
@pytest.mark.parametrize("body", ["{}", '{"items": 3}', '{"items": [1]}', '{"items": [{}]}', '{"items": [null]}'])
def test_an_answer_that_is_not_understood_is_told(
    httpserver: HTTPServer, capsys: pytest.CaptureFixture[str], question: list[str], body: str
) -> None:
    httpserver.expect_request(ANY_PATH).respond_with_data(body, content_type="application/json")
    assert main([*question, "--url", httpserver.url_for("/")]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"allocscope: what {httpserver.url_for('/')} says is not understood (")
    assert said.err.endswith("): are it and this command of one version?\n")


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://[::1", "http://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_told_and_none_leads_to_this_machine(
    httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert main(["jobs", "--url", "http://collector.invalid"]) == 1
    assert capsys.readouterr().err.startswith("allocscope: ")
    httpserver.expect_request("/api/v1/jobs").respond_with_json({"items": []})
    assert main(["jobs", "--url", f"127.0.0.1:{httpserver.port}"]) == 0
    assert main(["jobs", "--url", f"localhost:{httpserver.port}"]) == 0


@pytest.mark.parametrize("token", ["ü", "a\nb", "a b"])
def test_a_token_that_none_can_be_is_told(
    httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], token: str
) -> None:
    monkeypatch.setenv("ALLOCSCOPE_TOKEN", token)
    assert main(["jobs", "--url", httpserver.url_for("/")]) == 1
    assert capsys.readouterr().err == (
        "allocscope: ALLOCSCOPE_TOKEN must hold one token, of printable ASCII without spaces\n"
    )


def test_pages_without_end_are_left(httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    httpserver.expect_request("/api/v1/jobs").respond_with_json({"items": [{}], "next_cursor": "x"})
    assert main(["jobs", "--json", "--url", httpserver.url_for("/")]) == 1
    assert "gives the same page again and again" in capsys.readouterr().err


def test_what_it_says_does_nothing_to_a_terminal(httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"error": {"code": "unknown_job", "message": "no\x1b[2Jjob\nhere"}}
    httpserver.expect_request("/api/v1/jobs/x/bill").respond_with_json(error, status=404)
    assert main(["bill", "x", "--url", httpserver.url_for("/")]) == 1
    assert capsys.readouterr().err == "allocscope: no?[2Jjob?here\n"
