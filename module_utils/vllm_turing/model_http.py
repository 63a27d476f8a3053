"""HTTP for large files: redirects followed by hand, so that an error names the host that failed.

A mirror's API may be reachable while the weights redirect to a host that is not. Whoever reads the
error must learn that, and not that "the mirror" is down. Following by hand also keeps the token
where it belongs: it is sent to the source itself and to no host that the source redirects to.

Proxies are honoured as the environment names them (``https_proxy``, ``no_proxy``).
"""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from .model_lock import ModelError

USER_AGENT = "vllm-turing-model-fetch/1"
MAX_HOPS = 6
#: A server may ask for at most this many seconds of patience in Retry-After.
MAX_RETRY_AFTER = 300.0


class TransferError(Exception):
    """One attempt failed.

    :ivar kind: network (no or a broken connection), busy (429, 503: try later), denied (401, 403),
        missing (404, 410), wrong (an answer that is not the file)
    :ivar retry_after: seconds that the server asked for, if it did
    """

    def __init__(self, kind: str, message: str, retry_after: float | None = None) -> None:
        """Keep what kind of failure it was."""
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after


@dataclass(frozen=True)
class Source:
    """A place that has the files: a Hub endpoint or a plain web folder.

    :ivar base: URL without a trailing slash
    :ivar plain: files lie directly below ``base`` (a web server on the LAN)
    """

    base: str
    plain: bool = False

    @property
    def host(self) -> str:
        """The host's name for messages."""
        return urlsplit(self.base).netloc

    @property
    def origin(self) -> tuple[str, str]:
        """Scheme and host: the only place that may see the token."""
        parts = urlsplit(self.base)
        return parts.scheme, parts.netloc

    def url(self, repo: str, commit: str, path: str) -> str:
        """Return where a file of a revision is asked for."""
        if self.plain:
            return f"{self.base}/{quote(path)}"
        return f"{self.base}/{repo}/resolve/{commit}/{quote(path)}"


def parse_source(text: str) -> Source:
    """Read one entry of the list of sources.

    :param text: ``https://hub`` for a Hub endpoint, ``files+http://host/folder`` for plain files
    :raises ModelError: it is neither; permanent
    """
    plain = text.startswith("files+")
    base = text.removeprefix("files+").rstrip("/")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ModelError(
            f"the model source '{text}' is no address: write 'https://host' for a Hub, "
            "'files+http://host/folder' for a web folder or '/folder' for files of this host",
            permanent=True,
        )
    if parts.username or parts.password:
        raise ModelError(
            f"the model source for '{parts.hostname}' holds a password: "
            "put the token in a file instead",
            permanent=True,
        )
    return Source(base, plain)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Let redirects come back as answers."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


@dataclass
class Answer:
    """An answer that is not a redirect, and where it came from."""

    status: int
    headers: Mapping[str, str]
    body: http.client.HTTPResponse
    url: str

    @property
    def length(self) -> int | None:
        """Content-Length, where there is one."""
        text = self.headers.get("Content-Length")
        return int(text) if text and text.isdigit() else None

    def close(self) -> None:
        """Drop the connection."""
        with contextlib.suppress(OSError):
            self.body.close()

    def __enter__(self) -> Answer:
        """Use as a context."""
        return self

    def __exit__(self, *unused: object) -> None:
        """Drop the connection."""
        self.close()


def fetch(
    source: Source, url: str, headers: Mapping[str, str], token: str = "", timeout: float = 20.0
) -> Answer:
    """Ask for a URL and follow its redirects.

    :param source: the source the URL belongs to (decides who sees the token)
    :param timeout: seconds for connecting and for each read
    :raises TransferError: no answer, or one with status 400 or more
    """
    first = url
    for _ in range(MAX_HOPS):
        parts = urlsplit(url)
        sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **headers}
        if token and (parts.scheme, parts.netloc) == source.origin:
            sent["Authorization"] = f"Bearer {token}"
        who = _who(source, parts.netloc)
        try:
            body = _OPENER.open(urllib.request.Request(url, headers=sent), timeout=timeout)
            return Answer(body.status, body.headers, body, url)
        except urllib.error.HTTPError as error:
            with error:
                location = error.headers.get("Location")
                if error.code in (301, 302, 303, 307, 308) and location:
                    url = urljoin(url, location)
                    if urlsplit(url).scheme not in ("http", "https"):
                        raise TransferError("wrong", f"{who} redirects to '{url}'") from error
                    continue
                raise _refusal(error, who) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TransferError(
                "network", f"{who} cannot be reached: {reason_of(error)}"
            ) from error
    raise TransferError("wrong", f"'{source.host}' redirects '{first}' in a circle")


def _who(source: Source, host: str) -> str:
    """Name the host of a request, and how one came to it."""
    if host == source.host:
        return f"'{host}'"
    return f"'{host}' (where '{source.host}' sends the files)"


def _refusal(error: urllib.error.HTTPError, who: str) -> TransferError:
    code = error.code
    text = error.headers.get("X-Error-Message") or error.reason
    if code in (408, 425, 429, 500, 502, 503, 504):
        said = "limits our requests" if code == 429 else "is busy or broken"
        wait = retry_after(error.headers.get("Retry-After"))
        return TransferError("busy", f"{who} {said} (status {code})", wait)
    if code in (401, 403):
        return TransferError("denied", f"{who} denies access (status {code}: {text})")
    if code in (404, 410):
        return TransferError("missing", f"{who} does not have it (status {code}: {text})")
    return TransferError("wrong", f"{who} answers with status {code} ({text})")


def retry_after(text: str | None) -> float | None:
    """Read a Retry-After header: seconds or a date; None when there is none."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    if not math.isfinite(seconds):
        return None
    return min(MAX_RETRY_AFTER, max(0.0, seconds))


def reason_of(error: BaseException) -> str:
    """Put a network error into a few words."""
    cause = getattr(error, "reason", None)
    if isinstance(cause, BaseException):
        error = cause
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, socket.gaierror):
        return "its name is not known"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended early"
    return str(error) or type(error).__name__
