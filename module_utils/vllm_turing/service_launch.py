"""``launch``: become the engine, with what a unit file cannot say.

Reads the key from the unit's credentials, points the JIT caches at the release's own folder,
records what is started, and then replaces itself: the running process is the plain command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import service_settings
from .service_settings import Settings

#: Where vLLM reads the key when no ``--api-key`` is given (vllm/envs.py).
KEY_VARIABLE = "VLLM_API_KEY"


class LaunchError(Exception):
    """Why the engine cannot be started, in one sentence."""


def text_digest(text: str) -> str:
    """Return the sha256 of a file's meaning: comment lines and blank lines do not count."""
    kept = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def environment_digest(environment: Mapping[str, str | None]) -> str:
    """Return the sha256 of some variables and their values; ``None`` is "not set"."""
    data = json.dumps(sorted(environment.items()), ensure_ascii=True)
    return hashlib.sha256(data.encode()).hexdigest()


def key_digest(key: str | None) -> str | None:
    """Return a digest of the key; the key is 256 random bits, so it does not give it away."""
    return None if key is None else hashlib.sha256(f"api-key {key}".encode()).hexdigest()


def release_of(link: str) -> dict[str, Any]:
    """Read the completion mark of the release behind a link or folder.

    :raises LaunchError: when there is none
    """
    mark = Path(link) / "release.json"
    try:
        data = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"{link!r} leads to no complete release ({error}); run site.yml so that it is built"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("fingerprint"), str):
        raise LaunchError(f"{str(mark)!r} names no fingerprint; build the release again")
    return data


def cache_environment(settings: Settings, fingerprint: str) -> dict[str, str]:
    """Return the variables that point at the release's own caches, as its stack lists them.

    :raises LaunchError: when the release does not say
    """
    description = Path(settings.release_link) / "stack" / "stack.json"
    try:
        caches = json.loads(description.read_text(encoding="utf-8"))["caches"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"{str(description)!r} lists no caches ({error}); build the release again"
        ) from error
    return service_settings.cache_environment(settings.cache_dir, fingerprint, caches)


def prepare(
    settings: Settings, environment: Mapping[str, str], argv: Sequence[str], unit_digest: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """Work out the engine's environment and the record of this start.

    :param environment: the process's own, as systemd made it
    :param argv: the engine's command
    :param unit_digest: digest of the unit, as the unit itself carries it
    :returns: environment for the engine, and the record without a pid
    :raises LaunchError: without a complete release, configuration or key
    """
    release = release_of(settings.release_link)
    try:
        config = Path(settings.config).read_text(encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot read {settings.config!r}: {error.strerror}") from error
    engine = {**environment, **cache_environment(settings, release["fingerprint"])}
    key = None
    if settings.api_key:
        key = _key(environment)
        engine[KEY_VARIABLE] = key
    else:
        engine.pop(KEY_VARIABLE, None)
    record = {
        "release": release["fingerprint"],
        "config": text_digest(config),
        "unit": unit_digest,
        "environment": environment_digest(
            {name: environment.get(name) for name in settings.environment_names}
        ),
        "key": key_digest(key),
        "model": os.path.realpath(settings.model_path),
        "argv": list(argv),
    }
    return engine, record


def _key(environment: Mapping[str, str]) -> str:
    """Read the key from the unit's credentials."""
    folder = environment.get("CREDENTIALS_DIRECTORY")
    if not folder:
        raise LaunchError("there is no $CREDENTIALS_DIRECTORY; start the service through systemd")
    try:
        key = (Path(folder) / "api-key").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise LaunchError(f"the API key cannot be read: {error.strerror}") from error
    if not key:
        raise LaunchError("the API key is empty; remove its file and run site.yml again")
    return key


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write what is started where the role looks for it, in one rename."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(record, file)
    draft.rename(path)


def main(argv: list[str]) -> int:
    """Replace this process by the engine.

    :returns: only when that failed: 1, with the reason on stderr
    """
    parser = argparse.ArgumentParser(prog="vllm-turing-host launch")
    parser.add_argument("--settings", required=True)
    parser.add_argument("--unit-digest", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if not command:
            raise LaunchError("no command after '--'")
        settings = service_settings.load(options.settings)
        engine, record = prepare(settings, os.environ, command, options.unit_digest)
        for folder in cache_environment(settings, record["release"]).values():
            Path(folder).mkdir(mode=0o750, parents=True, exist_ok=True)
        write_record(settings.applied, {**record, "pid": os.getpid()})
        sys.stdout.flush()
        os.execve(command[0], command, engine)
    except (LaunchError, service_settings.SettingsError) as error:
        print(f"vllm-turing-host launch: {error}", file=sys.stderr)
    except OSError as error:
        where = error.filename or (command[0] if command else "")
        print(f"vllm-turing-host launch: {where}: {error.strerror}", file=sys.stderr)
    return 1
