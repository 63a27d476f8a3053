"""The API key: made on the host, once, readable by root alone; systemd hands it to the service."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

#: Bytes of randomness; the text is 43 characters of the URL-safe alphabet.
KEY_BYTES = 32
MODE = 0o600


@dataclass(frozen=True)
class Outcome:
    """What was (or, in check mode, would be) done.

    :ivar created: a new key was made
    :ivar tightened: the file was open to others, or belonged to another user
    :ivar mode: the permission bits that were found
    """

    created: bool
    tightened: bool
    mode: int = MODE


def ensure(path: str, *, check_mode: bool = False, owner: int | None = None) -> Outcome:
    """Make sure that there is a key only its owner can read.

    :param path: the key file; its folder is created
    :param check_mode: look only
    :param owner: the wanted user id; the caller's own when left out
    :raises OSError: when it cannot be written
    """
    file = Path(path)
    owner = os.geteuid() if owner is None else owner
    try:
        found = file.stat()
        empty = not file.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        found, empty = None, True
    if empty:
        if not check_mode:
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_name(f".{file.name}.{os.getpid()}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(f"{secrets.token_urlsafe(KEY_BYTES)}\n")
            draft.replace(file)
        return Outcome(created=True, tightened=False)
    assert found is not None
    mode = found.st_mode & 0o7777
    tightened = bool(mode & 0o077) or found.st_uid != owner
    if tightened and not check_mode:
        os.chown(file, owner, -1)
        file.chmod(MODE)
    return Outcome(created=False, tightened=tightened, mode=mode)
