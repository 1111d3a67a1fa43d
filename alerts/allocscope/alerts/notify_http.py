"""Handing JSON to somebody by HTTP: which addresses can be meant, and what an answer means for trying again."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from allocscope.alerts.notify import DeliveryError, NotifyError

TIMEOUT_S = 10.0
"""To connect, to send, and until an answer begins; for the rest of it as long again."""
LONGEST_ANSWER_BYTES = 1 << 16
"""Of an answer no more is read; all that can be wanted of it is why something was refused."""


class AddressError(NotifyError, ValueError):
    """An address that cannot be one."""

    def __init__(self, address: str, right: str) -> None:
        super().__init__(f"{_without_secrets(address)!r} is no address to tell of alerts at: it {right}")
        self.address = address
        self.right = right


def _without_secrets(address: str) -> str:
    scheme, slashes, rest = address.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    return f"{scheme}{slashes}{host}"


def wrong_with(address: str) -> str | None:
    """What would be right about an address that cannot be one; None where it can."""
    if address != address.strip() or not address.isprintable():
        return "must be without white space around it or control characters in it"
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        return f"must be an address such as https://host:9093 ({error})"
    if url.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if not url.host:
        return "must name a host, such as https://host:9093"
    if url.port is not None and not 1 <= url.port <= 65535:
        return f"must have a port between 1 and 65535, not {url.port}"
    if url.fragment:
        return "must be without a #fragment, which is never sent"
    return None


def checked(address: str) -> httpx.URL:
    """The address as one, or AddressError."""
    wrong = wrong_with(address)
    if wrong is not None:
        raise AddressError(address, wrong)
    return httpx.URL(address)


def shown(url: httpx.URL) -> str:
    """An address without what may be secret in it: user, password, path and query."""
    port = "" if url.port is None else f":{url.port}"
    return f"{url.host}{port}"


class Poster:
    """Posts JSON to one address. Redirects are not followed: an alert goes where it was said to go."""

    def __init__(self, url: httpx.URL, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._client = httpx.Client(timeout=timeout_s, follow_redirects=False)

    def post(self, content: object, headers: Mapping[str, str] | None = None) -> None:
        """Raises DeliveryError."""
        try:
            with self._client.stream("POST", self.url, json=content, headers=headers) as response:
                answer = _read(response, self._timeout_s)
        except httpx.TimeoutException as error:
            raise DeliveryError("timeout", f"no answer in time ({type(error).__name__})", again=True) from error
        except httpx.ProtocolError as error:
            raise DeliveryError("malformed", f"the answer is not HTTP: {error}", again=True) from error
        except httpx.RequestError as error:
            raise DeliveryError("unreachable", str(error) or type(error).__name__, again=True) from error
        _judge(response, answer)

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()


def _read(response: httpx.Response, within_s: float) -> str:
    """As far as it came in time: the status, which decides, is there."""
    answer, until_s = b"", time.monotonic() + within_s
    with suppress(httpx.RequestError):
        for piece in response.iter_raw():
            answer += piece
            if len(answer) > LONGEST_ANSWER_BYTES or time.monotonic() > until_s:
                break
    return answer.decode(errors="replace")


def _judge(response: httpx.Response, answer: str) -> None:
    status = response.status_code
    if response.is_success:
        return
    said = f"answered {status}: {answer[:300].strip()}" if answer.strip() else f"answered {status}"
    if response.is_redirect:
        raise DeliveryError("redirect", f"{said} (redirects are not followed: give the last address)", again=False)
    if status == httpx.codes.TOO_MANY_REQUESTS:
        raise DeliveryError("busy", said, again=True, retry_after_s=_retry_after_s(response))
    if response.is_server_error:
        raise DeliveryError("server_error", said, again=True, retry_after_s=_retry_after_s(response))
    raise DeliveryError("rejected", said, again=False)


def _retry_after_s(response: httpx.Response) -> float | None:
    """RFC 9110, 10.2.3: seconds, or a date."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max((at - datetime.now(at.tzinfo or UTC)).total_seconds(), 0.0)
