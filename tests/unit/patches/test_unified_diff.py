"""The strict diff reader and applier, against diffs that difflib makes."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_turing.unified_diff import DiffError, apply, hunks_in_place, parse, split_lines

# few different lines, so that text repeats and a hunk would fit in several places
LINE = st.sampled_from(
    [b"", b"a", b"b", b"}", b"--- a/x", b"+++ b/x", b"@@ -1 +1 @@", b"\r", b"\x0c"]
)
TEXT = st.builds(
    lambda lines, end: b"\n".join(lines) + (b"\n" if end and lines else b""),
    st.lists(LINE, max_size=25),
    st.booleans(),
)


def make_diff(before: bytes, after: bytes, context: int = 3, path: bytes = b"d/f.py") -> bytes:
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        split_lines(before),
        split_lines(after),
        b"a/" + path,
        b"b/" + path,
        n=context,
    )
    return b"".join(
        line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
        for line in lines
    )


@settings(max_examples=400, deadline=None)
@given(before=TEXT, after=TEXT, context=st.integers(min_value=0, max_value=4))
def test_applies_and_undoes_what_difflib_says(before: bytes, after: bytes, context: int) -> None:
    diff = make_diff(before, after, context)
    if before == after:
        with pytest.raises(DiffError):
            parse(diff)
        return
    (parsed,) = parse(diff)
    assert apply(before, parsed) == after
    assert apply(after, parsed.reversed()) == before


@settings(max_examples=200, deadline=None)
@given(before=TEXT, after=TEXT, shift=st.lists(LINE, min_size=1, max_size=3))
def test_has_no_fuzz(before: bytes, after: bytes, shift: list[bytes]) -> None:
    """A file that moved by some lines is refused, or (a repeating text) it is the wished change."""
    if before == after or not before:
        return
    (parsed,) = parse(make_diff(before, after))
    moved = b"".join(line + b"\n" for line in shift) + before
    first = parsed.hunks[0]
    start = first.old_start - 1 if first.old else first.old_start
    fits = all(
        tuple(split_lines(moved)[at : at + len(hunk.old)]) == hunk.old
        for hunk in parsed.hunks
        for at in [hunk.old_start - 1 if hunk.old else hunk.old_start]
    )
    if fits and start <= len(split_lines(moved)):
        return
    with pytest.raises(DiffError):
        apply(moved, parsed)


def test_several_files_creation_and_removal() -> None:
    text = (
        "a comment before the first file\n"
        "--- a/one\n+++ b/one\n@@ -1 +1 @@\n-old\n+new\n"
        "--- /dev/null\n+++ b/made\t2026-01-01\n@@ -0,0 +1,2 @@\n"
        "+x\n+y\n\\ No newline at end of file\n"
        "--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-z\n"
    )
    one, made, gone = parse(text)
    assert [diff.path for diff in (one, made, gone)] == ["one", "made", "gone"]
    assert apply(b"old\n", one) == b"new\n"
    assert apply(None, made) == b"x\ny"
    assert apply(b"x\ny", made.reversed()) is None
    assert apply(b"z\n", gone) is None
    with pytest.raises(DiffError, match="exists already"):
        apply(b"", made)
    with pytest.raises(DiffError, match="does not exist"):
        apply(None, gone)
    with pytest.raises(DiffError, match="remain"):
        apply(b"z\nmore\n", gone)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no file"),
        ("--- a/f\n", "line 2 .* should start with '\\+\\+\\+ '"),
        ("--- a/f\n+++ b/f\n", "changes nothing"),
        ("--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n", "renames 'f' to 'g'"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-a\n+b\n", "ends inside the hunk"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n+c\n", "line 6 of the diff is no hunk header"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n\n-a\n+b\n", "neither context"),
        ("--- a/f\n+++ b/f\n@@ -0 +1 @@\n-a\n+b\n", "starts at line 0"),
        ("@@ -1 +1 @@\n-a\n+b\n", "without a file header"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n" * 2, "names the file 'f' twice"),
        ("--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n", "names no file"),
    ],
)
def test_malformed_diff_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(DiffError, match=sentence):
        parse(text)


@pytest.mark.parametrize(
    ("hunks", "sentence"),
    [
        ("@@ -2 +2 @@\n-b\n+B\n@@ -1 +2 @@\n-a\n+A\n", "overlaps"),
        ("@@ -1 +2 @@\n-a\n+A\n", "says line 2 of the new file, but lands at line 1"),
        ("@@ -1 +1 @@\n-a\n+A\n\\ No newline at end of file\n", "joins two lines"),
        ("@@ -9,0 +10 @@\n+x\n", "does not fit at line 9"),
    ],
)
def test_hunks_that_do_not_add_up(hunks: str, sentence: str) -> None:
    (parsed,) = parse("--- a/f\n+++ b/f\n" + hunks)
    with pytest.raises(DiffError, match=sentence):
        apply(b"a\nb\nc\n", parsed)


def test_counts_hunks_of_a_half_applied_file() -> None:
    before = b"".join(b"line %d\n" % number for number in range(40))
    after = before.replace(b"line 5\n", b"five\n").replace(b"line 30\n", b"thirty\n")
    (parsed,) = parse(make_diff(before, after))
    half = before.replace(b"line 5\n", b"five\n")
    assert hunks_in_place(half, parsed) == (1, 1)
    assert hunks_in_place(after, parsed) == (2, 0)
