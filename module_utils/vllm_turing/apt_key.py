"""An archive's signing key: fetch it, check it by its fingerprint, store it for ``Signed-By``.

The fingerprint is computed here (RFC 4880 section 12.2 and RFC 9580 for version 4 keys), so that
a fresh box needs no gpg.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

#: A signing key of a few kilobytes is usual; more than this is not a key.
MAX_BYTES = 1_000_000


class KeyProblem(Exception):
    """The key cannot be had or is another one; the text is one sentence for a person."""


def dearmor(data: bytes) -> bytes:
    """Return the binary form of a key that may be ASCII-armoured."""
    if not data.lstrip().startswith(b"-----BEGIN"):
        return data
    text = data.decode("ascii", "replace").replace("\r", "")
    match = re.search(
        r"-----BEGIN PGP PUBLIC KEY BLOCK-----\n(?:.+\n)*?\n?((?:[A-Za-z0-9+/=]+\n)+?)"
        r"(?:=[A-Za-z0-9+/]{4}\n)?-----END PGP PUBLIC KEY BLOCK-----",
        text,
    )
    if not match:
        raise KeyProblem("what was fetched is no OpenPGP public key block")
    try:
        return base64.b64decode("".join(match.group(1).split()), validate=True)
    except binascii.Error as error:
        raise KeyProblem("the key block is damaged (not base64)") from error


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (tag, body) of every OpenPGP packet."""
    position = 0
    while position < len(data):
        head = data[position]
        if not head & 0x80:
            raise KeyProblem("the key file is damaged (no OpenPGP packet)")
        position += 1
        if head & 0x40:
            tag = head & 0x3F
            first = data[position]
            if first < 192:
                length, position = first, position + 1
            elif first < 224:
                length = ((first - 192) << 8) + data[position + 1] + 192
                position += 2
            elif first == 255:
                length = int.from_bytes(data[position + 1 : position + 5], "big")
                position += 5
            else:
                raise KeyProblem("the key file is damaged (partial packet)")
        else:
            tag = (head >> 2) & 0x0F
            size = head & 0x03
            if size == 3:
                length = len(data) - position
            else:
                octets = 1 << size
                length = int.from_bytes(data[position : position + octets], "big")
                position += octets
        yield tag, data[position : position + length]
        position += length


def fingerprints(data: bytes) -> list[str]:
    """Return the fingerprints of the primary keys, upper case without blanks.

    :param data: a key file, binary or armoured
    :raises KeyProblem: when it is no key file
    """
    found = []
    try:
        for tag, body in _packets(dearmor(data)):
            if tag == 6 and body[:1] == b"\x04":
                framed = b"\x99" + len(body).to_bytes(2, "big") + body
                found.append(hashlib.sha1(framed, usedforsecurity=False).hexdigest().upper())
    except IndexError as error:
        raise KeyProblem("the key file is damaged (cut short)") from error
    if not found:
        raise KeyProblem("what was fetched holds no OpenPGP public key")
    return found


def normalise(fingerprint: str) -> str:
    """Return a fingerprint without blanks, colons or ``0x``, in capitals."""
    return re.sub(r"[\s:]", "", fingerprint).removeprefix("0x").upper()


def fetch(
    url: str,
    *,
    timeout: float = 30.0,
    attempts: int = 3,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """Fetch a small file; tried again only for what passes by itself.

    :raises KeyProblem: names the URL and the reason
    """
    reason = ""
    for attempt in range(attempts):
        if attempt:
            sleep(2.0**attempt)
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:
                data: bytes = answer.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
        except urllib.error.URLError as error:
            reason = str(error.reason)
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                break
        except (OSError, TimeoutError) as error:
            reason = str(error) or error.__class__.__name__
        except ValueError as error:
            raise KeyProblem(f"'{url}' is no URL ({error})") from error
        else:
            if len(data) > MAX_BYTES:
                raise KeyProblem(f"'{url}' is not a key: it is larger than {MAX_BYTES} bytes")
            return data
    raise KeyProblem(
        f"the signing key '{url}' cannot be fetched: {reason}; check the mirror's address"
    )


def verified(data: bytes, fingerprint: str, source: str) -> bytes:
    """Return the key in binary form if it is the one wanted.

    :raises KeyProblem: names both fingerprints
    """
    wanted = normalise(fingerprint)
    found = fingerprints(data)
    if found != [wanted]:
        raise KeyProblem(
            f"the key from '{source}' has fingerprint '{', '.join(found)}', not '{wanted}'; "
            "it is not installed; compare with the archive's own announcement"
        )
    return dearmor(data)
