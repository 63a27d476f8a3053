"""Strict unified diffs: read one, apply one, undo one, on bytes and without fuzz.

``patch(1)`` is not installed on every host and, where it is, it guesses: it shifts hunks, drops
context and leaves ``.rej`` files behind. Here a hunk fits at exactly the line it names or the whole
diff is refused. The format is the one of POSIX ``diff -u`` (and of ``difflib.unified_diff``), with
GNU's ``\\ No newline at end of file`` marker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?$")
_NO_NEWLINE = b"\\ No newline at end of file"
_NOWHERE = "/dev/null"


class DiffError(Exception):
    """A diff that is not well formed, or does not fit; the text is one sentence."""


@dataclass(frozen=True)
class Hunk:
    """One hunk: the lines before and after, each with its line ending, and where they start.

    A start counts from 1; with no lines on that side it names the line before the gap.
    """

    old_start: int
    old: tuple[bytes, ...]
    new_start: int
    new: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        """Give the hunk that undoes this one."""
        return Hunk(self.new_start, self.new, self.old_start, self.old)


@dataclass(frozen=True)
class FileDiff:
    """All hunks of one file; ``creates``/``removes`` say that a side is ``/dev/null``."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    removes: bool = False

    def reversed(self) -> FileDiff:
        """Give the diff that undoes this one."""
        hunks = tuple(hunk.reversed() for hunk in self.hunks)
        return FileDiff(self.path, hunks, creates=self.removes, removes=self.creates)


def split_lines(content: bytes) -> list[bytes]:
    r"""Cut at ``\n`` only, keeping it (``\r``, form feeds and the like stay inside a line)."""
    lines = content.split(b"\n")
    kept = [line + b"\n" for line in lines[:-1]]
    if lines[-1]:
        kept.append(lines[-1])
    return kept


def parse(text: str | bytes) -> list[FileDiff]:
    """Read a unified diff of one or several files.

    :param text: the diff; lines before the first ``---`` are a comment
    :raises DiffError: naming the line that is wrong
    """
    data = text.encode() if isinstance(text, str) else text
    lines = [line.removesuffix(b"\n") for line in split_lines(data)]
    files: list[FileDiff] = []
    seen: set[str] = set()
    at = 0
    while at < len(lines) and not lines[at].startswith(b"--- "):
        if lines[at].startswith((b"@@", b"+++")):
            raise DiffError(f"line {at + 1} of the diff is a hunk without a file header")
        at += 1
    while at < len(lines):
        parsed, at = _parse_file(lines, at)
        if parsed.path in seen:
            raise DiffError(f"the diff names the file '{parsed.path}' twice")
        seen.add(parsed.path)
        files.append(parsed)
    if not files:
        raise DiffError("the diff is empty: it names no file")
    return files


def apply(content: bytes | None, diff: FileDiff) -> bytes | None:
    """Give the content after the diff.

    :param content: the file as it is; None if it does not exist
    :returns: the new content; None if the diff removes the file
    :raises DiffError: if any line that the diff names is not exactly there
    """
    if diff.creates != (content is None):
        there = "does not exist" if content is None else "exists already"
        raise DiffError(f"'{diff.path}' {there}")
    lines = split_lines(content or b"")
    out: list[bytes] = []
    taken = 0
    for number, hunk in enumerate(diff.hunks, start=1):
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        if start < taken:
            raise DiffError(f"hunk {number} of '{diff.path}' overlaps the one before it")
        out += lines[taken:start]
        if tuple(lines[start : start + len(hunk.old)]) != hunk.old or start > len(lines):
            raise DiffError(f"hunk {number} of '{diff.path}' does not fit at line {hunk.old_start}")
        expected = len(out) + 1 if hunk.new else len(out)
        if hunk.new_start != expected:
            raise DiffError(
                f"hunk {number} of '{diff.path}' says line {hunk.new_start} of the new file,"
                f" but lands at line {expected}"
            )
        out += hunk.new
        taken = start + len(hunk.old)
    out += lines[taken:]
    if any(not line.endswith(b"\n") for line in out[:-1]):
        raise DiffError(f"the diff of '{diff.path}' joins two lines: an inner line has no newline")
    if diff.removes:
        if out:
            raise DiffError(f"the diff removes '{diff.path}', but {len(out)} lines of it remain")
        return None
    return b"".join(out)


def hunks_in_place(content: bytes, diff: FileDiff) -> tuple[int, int]:
    """How many hunks' new text, and how many hunks' old text, occur in a file that fits neither.

    Only to explain a file that somebody changed by hand; nothing is decided by it.
    """
    new = sum(1 for hunk in diff.hunks if hunk.new and b"".join(hunk.new) in content)
    old = sum(1 for hunk in diff.hunks if hunk.old and b"".join(hunk.old) in content)
    return new, old


def _parse_file(lines: list[bytes], at: int) -> tuple[FileDiff, int]:
    """One file's header and hunks, from line index ``at``; returns it and the index after it."""
    old_name = _header_name(lines, at, b"--- ")
    new_name = _header_name(lines, at + 1, b"+++ ")
    if old_name == _NOWHERE and new_name == _NOWHERE:
        raise DiffError(f"line {at + 1} of the diff names no file")
    old_path = None if old_name == _NOWHERE else _without_prefix(old_name, "a/")
    new_path = None if new_name == _NOWHERE else _without_prefix(new_name, "b/")
    if old_path is not None and new_path is not None and old_path != new_path:
        raise DiffError(f"line {at + 1} of the diff renames '{old_path}' to '{new_path}'")
    path = old_path if old_path is not None else new_path
    assert path is not None  # one of the two is a name: checked above
    at += 2
    hunks: list[Hunk] = []
    while at < len(lines) and not lines[at].startswith(b"--- "):
        hunk, at = _parse_hunk(lines, at)
        hunks.append(hunk)
    if not hunks:
        raise DiffError(f"the diff changes nothing in '{path}'")
    return FileDiff(path, tuple(hunks), creates=old_path is None, removes=new_path is None), at


def _header_name(lines: list[bytes], at: int, mark: bytes) -> str:
    if at >= len(lines) or not lines[at].startswith(mark):
        raise DiffError(f"line {at + 1} of the diff should start with '{mark.decode()}'")
    # diff -u puts a time stamp after a tab
    return lines[at][len(mark) :].split(b"\t")[0].decode("utf-8", "replace").strip()


def _without_prefix(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)


def _parse_hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if match is None:
        shown = lines[at][:60].decode("utf-8", "replace")
        raise DiffError(f"line {at + 1} of the diff is no hunk header: '{shown}'")
    old_start, old_count, new_start, new_count = (
        int(match[1]),
        int(match[2]) if match[2] is not None else 1,
        int(match[3]),
        int(match[4]) if match[4] is not None else 1,
    )
    head = at + 1
    old: list[bytes] = []
    new: list[bytes] = []
    at += 1
    while len(old) < old_count or len(new) < new_count:
        if at >= len(lines):
            raise DiffError(f"the diff ends inside the hunk of line {head}")
        kind, line = lines[at][:1], lines[at][1:] + b"\n"
        if at + 1 < len(lines) and lines[at + 1] == _NO_NEWLINE:
            line = line[:-1]
            step = 2
        else:
            step = 1
        if kind == b" ":
            old.append(line)
            new.append(line)
        elif kind == b"-":
            old.append(line)
        elif kind == b"+":
            new.append(line)
        else:
            raise DiffError(f"line {at + 1} of the diff is neither context, removed nor added")
        at += step
    if len(old) != old_count or len(new) != new_count:
        raise DiffError(f"the hunk of line {head} has other lengths than its header says")
    if (old_count and not old_start) or (new_count and not new_start):
        raise DiffError(f"the hunk of line {head} starts at line 0")
    return Hunk(old_start, tuple(old), new_start, tuple(new)), at
