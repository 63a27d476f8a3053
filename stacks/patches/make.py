#!/usr/bin/env python3
"""Make or renew a patch's diff and digests from two trees.

    make.py NAME BEFORE AFTER

BEFORE is the root that the patch applies to (an unpacked wheel, a checkout, or such a tree with the
required patches applied); AFTER is a folder that holds only the changed files, under the same
paths. Writes ``NAME/NAME.diff`` beside this program and the ``files`` of ``NAME/patch.yml``, whose
other keys are written by hand and have to be there already.
"""

from __future__ import annotations

import difflib
import hashlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "module_utils"))

from vllm_turing.unified_diff import FileDiff, apply, parse, split_lines  # noqa: E402 (path first)


def unified(path: str, before: bytes | None, after: bytes) -> bytes:
    """Write one file's unified diff with three lines of context."""
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        split_lines(before or b""),
        split_lines(after),
        b"/dev/null" if before is None else b"a/" + path.encode(),
        b"b/" + path.encode(),
    )
    return b"".join(
        line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
        for line in lines
    )


def main(argv: list[str]) -> int:
    """Run the program."""
    if len(argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    name, before_root, after_root = argv[0], Path(argv[1]), Path(argv[2])
    diff = b""
    files = ""
    for after_path in sorted(path for path in after_root.rglob("*") if path.is_file()):
        path = after_path.relative_to(after_root).as_posix()
        before_path = before_root / path
        before = before_path.read_bytes() if before_path.exists() else None
        after = after_path.read_bytes()
        part = unified(path, before, after)
        parsed: FileDiff = parse(part)[0]
        if apply(before, parsed) != after:
            raise SystemExit(f"the diff of '{path}' does not give it back")
        diff += part
        old = "null" if before is None else hashlib.sha256(before).hexdigest()
        files += f"  - path: {path}\n    before: {old}\n"
        files += f"    after: {hashlib.sha256(after).hexdigest()}\n"
    description = HERE / name / "patch.yml"
    head = description.read_text().partition("files:\n")[0]
    description.write_text(f"{head}files:\n{files}")
    (HERE / name / f"{name}.diff").write_bytes(diff)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
