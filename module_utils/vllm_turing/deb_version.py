"""Debian package versions: their order, and the upstream part of a driver package's version.

The order is the one of Debian policy 5.6.12 (what ``dpkg --compare-versions`` does), written out
because a process per comparison is too slow and the host needs nothing but Python.
"""

from __future__ import annotations

import re

_PART = re.compile(r"(\D*)(\d*)")


def _order(char: str) -> int:
    """Weight of one non-digit: ``~`` before the end, the end before letters, then the rest."""
    if char == "~":
        return -1
    return ord(char) if char.isalpha() else ord(char) + 256


def _fragment_key(text: str) -> list[tuple[list[int], int]]:
    """Turn an upstream version or a revision into something Python orders like dpkg does."""
    key: list[tuple[list[int], int]] = []
    for letters, digits in _PART.findall(text):
        if not letters and not digits:
            continue
        # The closing 0 is the end of the text: after "~", before every letter.
        key.append(([*(_order(char) for char in letters), 0], int(digits or 0)))
    # An exhausted text counts as an empty non-digit part followed by 0.
    key.append(([0], 0))
    return key


#: What :func:`key` returns: epoch, upstream part, revision.
Key = tuple[int, list[tuple[list[int], int]], list[tuple[list[int], int]]]


def split(version: str) -> tuple[int, str, str]:
    """Split a version into epoch, upstream part and revision (``""`` when there is none)."""
    text = version.strip()
    epoch, colon, rest = text.partition(":")
    if not colon or not epoch.isdigit():
        epoch, rest = "0", text
    upstream_part, dash, revision = rest.rpartition("-")
    if not dash:
        upstream_part, revision = rest, ""
    return int(epoch), upstream_part, revision


def key(version: str) -> Key:
    """Return a sort key that orders versions as dpkg does."""
    epoch, upstream_part, revision = split(version)
    return epoch, _fragment_key(upstream_part), _fragment_key(revision)


def compare(left: str, right: str) -> int:
    """Return -1, 0 or 1 as the left version is older than, equal to or newer than the right."""
    left_key, right_key = key(left), key(right)
    return (left_key > right_key) - (left_key < right_key)


def upstream(version: str) -> str:
    """Return the upstream part: ``580.159.03`` of ``580.159.03-0ubuntu0.24.04.1``."""
    return split(version)[1]


def branch(version: str) -> str:
    """Return the driver branch of a package or driver version: ``580`` of ``580.159.03-…``."""
    return upstream(version).split(".", 1)[0]
