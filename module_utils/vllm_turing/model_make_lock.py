"""Make a model's lock file on the controller, for a user to review and commit.

The Hub lists the sha256 of large files but only the git blob id of small ones; those are fetched
(a few megabytes), compared with the blob id and hashed. The weights are not fetched.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from . import model_listing
from .model_http import parse_source
from .model_lock import Lock, ModelError, file_digests, write_atomically
from .model_transfer import Settings, Transfer

DEFAULT_ENDPOINT = "https://huggingface.co"


def make_lock(
    endpoint: str,
    repo: str,
    revision: str,
    *,
    python: str = sys.executable,
    token_file: str = "",
    settings: Settings | None = None,
) -> Lock:
    """Return a complete lock of a revision.

    :param endpoint: a Hub, best the real one: what it says is what later runs hold to
    :param python: an interpreter that has huggingface_hub
    :raises ModelError: it cannot be listed, or a small file cannot be had
    """
    source = parse_source(endpoint)
    with tempfile.TemporaryDirectory(prefix="vllm-turing-lock-") as scratch:
        lock = model_listing.list_revision(
            python, source.base, repo, revision, token_file=token_file, home=f"{scratch}/client"
        )
        small = {path: file for path, file in lock.files.items() if file.sha256 is None}
        folder = Path(scratch) / "files"
        folder.mkdir()
        token = model_listing.read_token(token_file)
        transfer = Transfer(
            lock.repo, lock.commit, small, folder, [source], settings, token=token, log=_quiet
        )
        transfer.run()
        return lock.with_digests({path: file_digests(folder / path)[0] for path in small})


def _quiet(text: str) -> None:
    """Keep single attempts to ourselves: the error at the end tells all."""


def main(argv: list[str] | None = None) -> int:
    """Write the lock of REPO[@REV]; 1 when it cannot be made."""
    parser = argparse.ArgumentParser(prog="lock-model", description=__doc__)
    parser.add_argument("model", metavar="REPO[@REV]")
    parser.add_argument("--endpoint", default=DEFAULT_ENDPOINT, help="the Hub to ask")
    parser.add_argument("--token-file", default="", help="file with a Hub token")
    parser.add_argument("--output", type=Path, help="file to write; NAME.lock.json when left out")
    options = parser.parse_args(argv)
    repo, _, revision = options.model.partition("@")
    output = options.output or Path(f"{repo.rpartition('/')[2]}.lock.json")
    try:
        lock = make_lock(options.endpoint, repo, revision or "main", token_file=options.token_file)
        write_atomically(output, lock.dump())
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"'{output}' cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(
        f"{output}: {lock.repo} at {lock.commit}, {len(lock.files)} files, {lock.size / 1e9:.2f} GB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
