"""One HTTP request that neither hangs, nor raises, nor follows a redirect.

The redirect is what the network checks want to see: weights often come from another host than
the one that was asked.
"""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from typing import Any

from .preflight_host import Answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Hand a redirect back as the answer that it is."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        """Follow nothing."""
        return None


def request(method: str, url: str, *, timeout: float, limit: int = 65536) -> Answer:
    """Send one request; proxies come from the environment, certificates are checked.

    :param limit: most bytes of the body that are read
    """
    opener = urllib.request.build_opener(_NoRedirect())
    try:
        wanted = urllib.request.Request(url, method=method, headers={"User-Agent": "vllm-turing"})
        with opener.open(wanted, timeout=timeout) as response:
            return Answer(response.status, _headers(response.headers), response.read(limit))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _headers(error.headers), _body(error, limit))
    except urllib.error.URLError as error:
        return Answer(error=_reason(error.reason))
    except (OSError, ssl.SSLError, http.client.HTTPException, ValueError) as error:
        return Answer(error=_reason(error))


def _body(error: urllib.error.HTTPError, limit: int) -> bytes:
    try:
        return error.read(limit)
    except (OSError, http.client.HTTPException):
        return b""


def _headers(headers: Any) -> dict[str, str]:
    return {str(name).lower(): str(value) for name, value in (headers or {}).items()}


def _reason(reason: Any) -> str:
    """Return a short reason from an exception or a text."""
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    text = getattr(reason, "strerror", None) or str(reason)
    return " ".join(str(text).split()) or type(reason).__name__
