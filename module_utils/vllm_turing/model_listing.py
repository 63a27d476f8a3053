"""Ask a Hub what a revision consists of, with the Hub's own client.

Runs in the host's tools venv, which has huggingface_hub, as a process of its own, so that it can be
given a time limit and its memory goes back before a download of hours. It prints a lock as JSON, or
one sentence on standard error.

The endpoint is handed over explicitly as well as in the environment: the client reads
``HF_ENDPOINT`` when it is imported, and a variable that is set later is ignored silently.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .model_http import reason_of, retry_after
from .model_lock import Lock, LockedFile, ModelError, parse, path_problem
from .run import Runner, run

TRIES = 4


def client_environment(endpoint: str, token_file: str, home: str) -> dict[str, str]:
    """Return the environment in which the Hub's client goes to one endpoint and nowhere else.

    Xet is off: its data comes from hosts that a mirror does not serve, and the client does not
    fall back to HTTP (it hangs for a minute, then fails).
    """
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0" if token_file else "1",
        "HF_HOME": home,
    }
    if token_file:
        environment["HF_TOKEN_PATH"] = token_file
    return environment


def list_revision(
    python: str,
    endpoint: str,
    repo: str,
    revision: str,
    *,
    token_file: str = "",
    home: str,
    timeout: float = 600.0,
    runner: Runner = run,
) -> Lock:
    """Make a lock from what a Hub says.

    :param python: an interpreter that has huggingface_hub
    :param home: folder for the client's own files
    :raises ModelError: no listing; the text is the sentence of the process
    """
    package = str(Path(__file__).resolve().parent.parent)
    # -I keeps the caller's folder and user packages out of the path.
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); "
        f"from {__name__.rpartition('.')[0].rpartition('.')[2]}.model_listing import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = runner(
        [python, "-I", "-c", code, package, endpoint, repo, revision],
        timeout=timeout,
        env=client_environment(endpoint, token_file, home),
    )
    if done.ok:
        return parse(done.stdout, f"listing of {endpoint}")
    if done.error == "not found":
        raise ModelError(
            f"the Hub client is not installed: '{python}' does not exist", permanent=True
        )
    if done.error:
        raise ModelError(f"asking '{endpoint}' for '{repo}' {done.error}")
    said = done.stderr.strip().splitlines() or ["the Hub client ended without a word"]
    raise ModelError(said[-1], permanent=done.rc == 78)


def main(argv: list[str]) -> int:
    """Print the lock of ``endpoint repo revision``; 78 for what no retry can mend, else 1."""
    endpoint, repo, revision = argv
    try:
        lock = _list(endpoint, repo, revision)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 78 if error.permanent else 1
    print(lock.dump())
    return 0


def _list(endpoint: str, repo: str, revision: str) -> Lock:
    """Ask with retries: the client itself does not repeat the calls of its API."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi(endpoint=endpoint, library_name="vllm-turing")
    host = endpoint.partition("://")[2]
    for attempt in range(1, TRIES + 1):
        try:
            info = api.model_info(repo, revision=revision, timeout=20)
            commit = str(info.sha)
            entries = list(api.list_repo_tree(repo, recursive=True, revision=commit))
            return Lock(repo, commit, locked_files(entries, host), revision)
        except GatedRepoError as error:
            raise ModelError(
                f"'{repo}' is gated: accept its terms at {endpoint}/{repo} and put a token into "
                "the file that hf_model_token_file names",
                permanent=True,
            ) from error
        except RevisionNotFoundError as error:
            raise ModelError(
                f"'{host}' has '{repo}' but no revision '{revision}' of it (hf_model_revision)",
                permanent=True,
            ) from error
        except RepositoryNotFoundError as error:
            raise ModelError(
                f"'{host}' has no repository '{repo}', or it is private (hf_model_repo, "
                "hf_model_token_file)",
                permanent=True,
            ) from error
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            if status not in (408, 429, 500, 502, 503, 504) or attempt == TRIES:
                said = "limits our requests" if status == 429 else "refuses to list the model"
                raise ModelError(f"'{host}' {said} (status {status})") from error
            asked = retry_after(error.response.headers.get("Retry-After"))
            time.sleep(2.0**attempt if asked is None else min(asked, 60.0))
        except ModelError:
            raise
        except ValueError as error:
            # Not JSON: a portal or a login page answers in the Hub's place.
            raise ModelError(
                f"'{host}' does not answer as a Hub does (a login page or another web server?)"
            ) from error
        except Exception as error:  # the client's HTTP library has errors of its own
            if attempt == TRIES:
                raise ModelError(
                    f"'{host}' cannot be reached: {_short(error)} (vllm_host_mirror_hub)"
                ) from error
            time.sleep(attempt)
    raise ModelError(f"'{host}' gave no listing in {TRIES} tries")


def _short(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return reason_of(cause)
        cause = cause.__cause__ or cause.__context__
    return reason_of(error)


def locked_files(entries: list[Any], host: str) -> Mapping[str, LockedFile]:
    """Turn the Hub's tree into locked files.

    :param entries: RepoFile and RepoFolder of huggingface_hub
    :raises ModelError: a path that leads out of the folder, or nothing at all
    """
    files: dict[str, LockedFile] = {}
    for entry in entries:
        if not hasattr(entry, "size"):
            continue
        problem = path_problem(entry.path)
        if problem:
            raise ModelError(f"'{host}' lists the file '{entry.path}', which {problem}")
        lfs = entry.lfs
        if lfs is None:
            files[entry.path] = LockedFile(int(entry.size), None, str(entry.blob_id))
        else:
            files[entry.path] = LockedFile(int(lfs.size), str(lfs.sha256), str(entry.blob_id))
    if not files:
        raise ModelError(f"'{host}' lists no file for this revision")
    return files


def token_path(token_file: str) -> Path | None:
    """Return where the token lies; a bare name is a credential that systemd hands over."""
    if not token_file:
        return None
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return Path(folder, token_file) if folder and "/" not in token_file else Path(token_file)


def read_token(token_file: str) -> str:
    """Return the token in a file, or "" when no file is named.

    :raises ModelError: the file is named but cannot be read
    """
    file = token_path(token_file)
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ModelError(
            f"the token file '{file}' cannot be read: {error.strerror}", permanent=True
        ) from error
