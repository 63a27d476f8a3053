"""Whether files that ought to be a model look like one, without reading their data.

A checksum says that a file is what the repository holds. This says that what is there can be
loaded: a safetensors header that fits the file, an index whose shards exist, no pointer left by a
``git clone`` without LFS, no web page saved under a model's name. It reads a few kilobytes a file.

Format: 8 bytes little-endian header length, a JSON object of name to ``{dtype, shape,
data_offsets}``, then the data without holes (safetensors 0.4 and later refuse anything else).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .model_lock import path_problem

#: The loader's own limit on a header, in bytes.
MAX_HEADER = 100_000_000
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"


@dataclass(frozen=True)
class Finding:
    """Something about a file that is not right.

    :ivar kind: missing | dangling | unreadable | pointer | html | damaged | index | stray
    :ivar fatal: the model cannot be served as it is
    """

    kind: str
    path: str
    message: str
    fatal: bool = True


def inspect_folder(folder: Path, expected: Iterable[str] = ()) -> list[Finding]:
    """Look at a model's folder.

    :param expected: files that must be there; others are then named as strays
    """
    findings: list[Finding] = []
    wanted = set(expected)
    present: set[str] = set()
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder).as_posix()
        if file.is_dir() and not file.is_symlink():
            continue
        if file.is_symlink() and not file.exists():
            target = file.readlink()
            text = f"'{path}' is a link to '{target}', which does not exist"
            findings.append(Finding("dangling", path, text))
            continue
        present.add(path)
        if wanted and path not in wanted:
            text = f"'{path}' ({file.stat().st_size} bytes) is not part of the model"
            findings.append(Finding("stray", path, text, fatal=False))
            continue
        finding = inspect_file(file, path)
        if finding:
            findings.append(finding)
    seen = present | {finding.path for finding in findings}
    findings += [Finding("missing", path, f"'{path}' is missing") for path in sorted(wanted - seen)]
    return findings + inspect_indexes(folder)


def inspect_file(file: Path, path: str) -> Finding | None:
    """Look at the start of one file, and at the header if it is one of safetensors."""
    try:
        with file.open("rb") as stream:
            start = stream.read(512)
    except OSError as error:
        return Finding("unreadable", path, f"'{path}' cannot be read: {error.strerror}")
    if start.startswith(_POINTER):
        size = start.partition(b"\nsize ")[2].split(b"\n")[0].decode("ascii", "replace")
        text = f"'{path}' is a git LFS pointer; the file itself has {size} bytes"
        return Finding("pointer", path, text)
    head = start.lstrip().lower()
    web_page = head.startswith((b"<!doctype html", b"<html"))
    if web_page and not path.endswith((".html", ".htm", ".md")):
        return Finding("html", path, f"'{path}' is a web page, not a file of the model")
    if path.endswith(".safetensors"):
        problem = header_problem(file)
        if problem:
            return Finding("damaged", path, f"'{path}' {problem}")
    return None


def header_problem(file: Path) -> str:
    """Return what is wrong with a safetensors file's header, or ""."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        raw = stream.read(8)
        if len(raw) < 8:
            return f"is too short ({size} bytes) to be a safetensors file"
        (length,) = struct.unpack("<Q", raw)
        if length > MAX_HEADER or 8 + length > size:
            return f"announces a header of {length} bytes in a file of {size}"
        text = stream.read(length)
    try:
        header = json.loads(text)
    except ValueError:
        return "has a header that is not JSON"
    if not isinstance(header, dict):
        return "has a header that is not a mapping"
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            low, high = entry["data_offsets"]
            bits = DTYPE_BITS[entry["dtype"]]
            for count in entry["shape"]:
                bits *= count
        except (KeyError, TypeError, ValueError):
            return f"describes the tensor '{name}' in no known way"
        if high - low != (bits + 7) // 8:
            return f"gives the tensor '{name}' {high - low} bytes where its shape needs {bits // 8}"
        spans.append((low, high))
    end = 0
    for low, high in sorted(spans):
        if low != end:
            return f"has a hole or an overlap at byte {end} of its data"
        end = high
    if 8 + length + end != size:
        return f"has {size} bytes where its header describes {8 + length + end}"
    return ""


def inspect_indexes(folder: Path) -> list[Finding]:
    """Compare every index of shards with the files beside it."""
    findings: list[Finding] = []
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not indexes:
        if any("-of-" in name for name in shards):
            text = "there are shards but no 'model.safetensors.index.json'"
            return [Finding("index", "model.safetensors.index.json", text)]
        return []
    named: set[str] = set()
    for index in indexes:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            named |= set(weight_map.values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            text = f"'{index.name}' is no index of shards ({type(error).__name__})"
            findings.append(Finding("index", index.name, text))
            continue
        for name in sorted(set(weight_map.values())):
            if path_problem(name) or "/" in name:
                text = f"'{index.name}' names '{name}', which is no file of this folder"
                findings.append(Finding("index", index.name, text))
            elif not (folder / name).exists():
                text = f"'{name}' is missing, though '{index.name}' names it"
                findings.append(Finding("missing", name, text))
    if named:
        findings += [
            Finding("stray", name, f"'{name}' is in no index of shards", fatal=False)
            for name in shards
            if name not in named
        ]
    return findings
