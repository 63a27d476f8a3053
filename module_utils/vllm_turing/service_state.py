"""Bring the service to the wanted state: compare, drain, switch, start, and put back what worked.

State decides: the launcher records what it started (release, configuration, unit, environment, key,
model), the role says what is wanted, and only a difference between the two leads to an action.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import service_http, service_launch, service_settings
from .run import Runner, run

#: What a running service is compared by, and how a difference is named to people.
COMPARED = {
    "release": "another release",
    "config": "changed flags",
    "unit": "changed unit",
    "environment": "changed environment",
    "key": "another API key",
    "model": "another model revision",
}
_LOG_LINES = 25
_SHOW = "LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,MainPID"


class StateError(Exception):
    """Why the wanted state could not be reached.

    :ivar log: the service's last log lines, where they help
    """

    def __init__(self, message: str, log: list[str] | None = None) -> None:
        """Take the sentence and the log lines."""
        super().__init__(message)
        self.log = log or []


@dataclass(frozen=True)
class Wanted:
    """What the role asks for.

    :ivar state: ``started``, ``stopped`` or ``paused`` (stopped for now, but left enabled)
    :ivar files: path to content of the unit, configuration and settings, as installed
    :ivar unit_path, config_path, settings_path: which of the files is which
    :ivar unit_digest: as the unit carries it
    :ivar release: fingerprint of the release; ``None`` keeps the one behind the link
    :ivar release_path: its folder
    :ivar key_path: file of the API key, ``None`` when no key is asked for
    :ivar library: folder that holds the ``vllm_turing`` package on the host
    :ivar data_dir: where the last good state and the results of flag checks are kept
    :ivar drain_timeout: seconds that running requests get
    """

    name: str
    state: str
    files: Mapping[str, str]
    unit_path: str
    config_path: str
    settings_path: str
    unit_digest: str
    environment: Mapping[str, str]
    release: str | None
    release_path: str | None
    release_link: str
    previous_link: str
    key_path: str | None
    user: str
    library: str
    data_dir: str
    drain_timeout: int = 180
    log_file: str | None = None

    @property
    def unit(self) -> str:
        """The unit's full name."""
        return f"{self.name}.service"

    @property
    def settings(self) -> service_settings.Settings:
        """The settings that are to be installed."""
        return service_settings.from_mapping(json.loads(self.files[self.settings_path]))


@dataclass(frozen=True)
class Observed:
    """What is there.

    :ivar applied: the launcher's record of the running engine; empty when there is none
    :ivar link: folder behind the release link, as a real path; ``None`` without a link
    :ivar link_release: fingerprint of the release behind it
    """

    load: str = "not-found"
    active: str = "inactive"
    sub: str = "dead"
    enabled: bool = False
    reload: bool = False
    applied: Mapping[str, Any] = field(default_factory=dict)
    link: str | None = None
    link_release: str | None = None

    @property
    def running(self) -> bool:
        """Whether there is something to drain and stop."""
        return self.active in ("active", "activating", "reloading", "deactivating")


@dataclass(frozen=True)
class Plan:
    """What has to be done.

    :ivar reasons: why, in words; empty when nothing has to be done
    """

    reload: bool = False
    enable: bool | None = None
    stop: bool = False
    switch: bool = False
    start: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether anything has to be done."""
        return self.reload or self.enable is not None or self.stop or self.switch or self.start

    def steps(self) -> list[str]:
        """Name the steps in their order."""
        named = [
            ("read the unit anew", self.reload),
            ("enable", self.enable is True),
            ("drain and stop", self.stop),
            ("disable", self.enable is False),
            ("switch the release", self.switch),
            ("start and wait for a completion", self.start),
        ]
        return [name for name, due in named if due]


def from_params(params: Mapping[str, Any]) -> Wanted:
    """Build the wish from the module's arguments; empty texts mean "not given"."""
    optional = ("release", "release_path", "key_path", "log_file")
    plain = ("name", "state", "unit_path", "config_path", "settings_path", "unit_digest", "user",
             "release_link", "previous_link", "library", "data_dir", "drain_timeout")  # fmt: skip
    values: dict[str, Any] = {name: params[name] for name in plain}
    values |= {name: params[name] or None for name in optional}
    return Wanted(
        files={item["path"]: item["content"] for item in params["files"]},
        environment={str(name): str(value) for name, value in params["environment"].items()},
        **values,
    )


def target(wanted: Wanted, observed: Observed) -> dict[str, Any]:
    """Return what the launcher would record if it started the wanted state now."""
    return {
        "release": wanted.release or observed.link_release,
        "config": service_launch.text_digest(wanted.files[wanted.config_path]),
        "unit": wanted.unit_digest,
        "environment": service_launch.environment_digest(wanted.environment),
        "key": service_launch.key_digest(_read(wanted.key_path)),
        "model": os.path.realpath(wanted.settings.model_path),
    }


def observe(wanted: Wanted, runner: Runner = run) -> Observed:
    """Look at the unit, the link and the launcher's record; changes nothing.

    :raises StateError: when systemd does not answer
    """
    result = runner(["systemctl", "show", wanted.unit, "--property", _SHOW], timeout=30)
    if not result.ok:
        words = result.error or result.stderr.strip() or f"exit status {result.rc}"
        raise StateError(f"systemd does not tell the state of {wanted.unit!r}: {words}")
    shown = dict(line.partition("=")[::2] for line in result.stdout.splitlines() if "=" in line)
    applied: dict[str, Any] = {}
    try:
        data = json.loads(wanted.settings.applied.read_text(encoding="utf-8"))
        if isinstance(data, dict) and str(data.get("pid")) == shown.get("MainPID"):
            applied = data
    except (OSError, ValueError):
        pass  # no record: nothing runs, or nothing that this project started
    link = os.path.realpath(wanted.release_link) if os.path.lexists(wanted.release_link) else None
    return Observed(
        load=shown.get("LoadState", "not-found"),
        active=shown.get("ActiveState", "inactive"),
        sub=shown.get("SubState", "dead"),
        enabled=shown.get("UnitFileState", "") == "enabled",
        reload=shown.get("NeedDaemonReload") == "yes",
        applied=applied,
        link=link,
        link_release=_fingerprint(link) if link else None,
    )


def plan(wanted: Wanted, observed: Observed) -> Plan:
    """Compare wanted and found."""
    loaded = observed.load == "loaded"
    switch = wanted.release is not None and wanted.release != observed.link_release
    reasons: list[str] = []
    if wanted.state == "paused":
        return Plan(stop=observed.running, reasons=("it is to pause",) if observed.running else ())
    if wanted.state == "stopped":
        if observed.running:
            reasons.append("it is to be stopped")
        if switch:
            reasons.append(COMPARED["release"])
        return Plan(
            reload=observed.reload,
            enable=False if observed.enabled else None,
            stop=observed.running,
            switch=switch,
            reasons=tuple(reasons),
        )
    if not observed.running:
        failed = observed.active == "failed"
        reasons.append("the last start failed" if failed else "it does not run")
    elif observed.active != "active":
        reasons.append(f"it is {observed.active}")
    goal = target(wanted, observed)
    differs: list[str] = []
    if observed.running:
        if observed.applied:
            differs = [
                text for key, text in COMPARED.items() if observed.applied.get(key) != goal[key]
            ]
        elif observed.active == "active":
            differs = ["it was started by something else"]
        else:
            # Still before the engine's start, or between two attempts: nothing is lost.
            differs = ["its start is not far yet"]
    elif switch:
        reasons.append(COMPARED["release"])
    stop = observed.running and bool(differs)
    return Plan(
        reload=observed.reload or not loaded,
        enable=None if observed.enabled else True,
        stop=stop,
        switch=switch,
        start=stop or observed.active != "active",
        reasons=tuple(reasons + differs),
    )


def check_flags(wanted: Wanted, observed: Observed, runner: Runner = run) -> list[str]:
    """Put the configuration to the installed vLLM's parser, once a release and configuration.

    :returns: what is wrong, one sentence a flag; empty when all is well or nothing is installed
    :raises StateError: when the check itself could not be made
    """
    folder = wanted.release_path or observed.link
    release = wanted.release or observed.link_release
    if not folder or not release or not Path(folder, "venv/bin/python").exists():
        return []  # a fresh box in check mode: there is no parser to ask yet
    text = wanted.files[wanted.config_path]
    memory = Path(wanted.data_dir) / "flags-checked.json"
    mark = f"{release} {service_launch.text_digest(text)}"
    checked = _json(memory).get("good", [])
    if mark in checked:
        return []
    program = (
        f"import sys; sys.path.insert(0, {wanted.library!r}); "
        "from vllm_turing.service_args_check import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [f"{folder}/venv/bin/python", "-c", program]
    if os.geteuid() == 0:
        command = ["runuser", "-u", wanted.user, "--", *command]
    # A home for the moment: runuser keeps root's, where libraries that make a cache folder at
    # import are refused.
    with tempfile.TemporaryDirectory(prefix="vllm-turing-flags-") as home:
        if os.geteuid() == 0:
            shutil.chown(home, wanted.user)
        environment = {**wanted.environment, "HOME": home, "PYTHONDONTWRITEBYTECODE": "1"}
        result = runner(command, timeout=300, env=environment, input=text, cwd="/")
    lines = result.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if result.ok and lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("problems"), list):
        tail = (result.stderr.strip().splitlines() or [""])[-1]
        raise StateError(
            f"the flags could not be checked with the vLLM in {folder!r}: "
            f"{result.error or tail or f'exit status {result.rc}'}",
            result.stderr.strip().splitlines()[-_LOG_LINES:],
        )
    found = [str(problem) for problem in answer["problems"]]
    if not found:
        _write_json(memory, {"good": [mark, *checked][:20]})
    return found


class Change:
    """Carries a plan out on the host."""

    def __init__(
        self,
        wanted: Wanted,
        observed: Observed,
        runner: Runner = run,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take what is wanted and what was found."""
        self.wanted = wanted
        self.observed = observed
        self.runner = runner
        self.sleep = sleep
        self.last_good = Path(wanted.data_dir) / "last-good.json"

    def carry_out(self, todo: Plan) -> None:
        """Do the steps; on a failed start put the last good state back.

        :raises StateError: with one sentence and the last log lines
        """
        wanted = self.wanted
        if todo.reload:
            self._systemctl("daemon-reload", timeout=60)
        if todo.stop:
            self._drain()
            self._stop()
        if todo.enable is not None:
            self._systemctl("enable" if todo.enable else "disable", wanted.unit, timeout=60)
        if todo.switch:
            if not wanted.release_path:
                raise StateError(
                    f"release {wanted.release!r} has no folder; run vllm_runtime first"
                )
            switch_link(wanted.release_link, wanted.release_path)
        if todo.start:
            self._start_or_restore(todo)
        if todo.switch and self.observed.link and Path(self.observed.link).is_dir():
            switch_link(wanted.previous_link, self.observed.link)

    def remember(self) -> None:
        """Keep the running state as the one to come back to."""
        wanted = self.wanted
        good = {
            "release_path": os.path.realpath(wanted.release_link),
            "files": dict(wanted.files),
        }
        if _json(self.last_good) != good:
            _write_json(self.last_good, good)

    def restore_files(self) -> bool:
        """Put the last good files back; returns whether there were any that differ."""
        good = _json(self.last_good).get("files", {})
        if not good or good == dict(self.wanted.files):
            return False
        for path, content in good.items():
            _replace(Path(path), content)
        self._systemctl("daemon-reload", timeout=60)
        return True

    def _start_or_restore(self, todo: Plan) -> None:
        """Start; when that fails, bring the last good state back and tell why."""
        since = time.time()
        problem = self._start()
        if problem is None:
            self.remember()
            return
        log = self.log_since(since)
        self._stop()
        why = f" ({', '.join(todo.reasons)})" if todo.reasons else ""
        sentence = f"{self.wanted.unit} did not get ready{why}: {cause(log) or problem}"
        good = _json(self.last_good)
        back = good.get("release_path")
        moved = bool(back) and back != os.path.realpath(self.wanted.release_link)
        if back and Path(back).is_dir():
            if moved:
                switch_link(self.wanted.release_link, back)
            if self.restore_files() or moved:
                again = self._start()
                if again is None:
                    raise StateError(f"{sentence}; the last good state serves again", log)
                self._stop()
                raise StateError(
                    f"{sentence}; the last good state was put back but does not start either: "
                    f"{again}",
                    log,
                )
        raise StateError(f"{sentence}; there is no other good state to go back to", log)

    def _start(self) -> str | None:
        """Start the unit and wait for it; returns systemd's complaint."""
        settings = self.wanted.settings
        # A failed unit also counts its starts; this one is asked for and must not be refused.
        self.runner(["systemctl", "reset-failed", self.wanted.unit], timeout=30)
        limit = settings.gate_timeout + settings.ready_timeout + 120
        result = self.runner(["systemctl", "start", self.wanted.unit], timeout=limit)
        if result.ok:
            return None
        first = (result.stderr.strip().splitlines() or [""])[0]
        return result.error or first or f"exit status {result.rc}"

    def _stop(self) -> None:
        """Stop the unit and whatever of it is about to restart."""
        self._systemctl("stop", self.wanted.unit, timeout=self.wanted.drain_timeout + 180)

    def _drain(self) -> None:
        """Wait, bounded, until no request runs or waits.

        What comes in after that is finished or refused by vLLM itself on SIGTERM
        (``--shutdown-timeout``).
        """
        settings = self.wanted.settings
        key = _read(self.wanted.key_path)
        deadline = time.monotonic() + self.wanted.drain_timeout
        while time.monotonic() < deadline:
            answer = service_http.ask(f"{settings.url}/metrics", key=key, timeout=5)
            if not answer.ok or service_http.in_flight(answer.body) == 0:
                return
            self.sleep(1.0)

    def log_since(self, since: float) -> list[str]:
        """Return the service's last log lines since a moment."""
        if self.wanted.log_file:
            try:
                with open(self.wanted.log_file, "rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
                    text = file.read().decode(errors="replace")
            except OSError:
                text = ""
            return text.splitlines()[-_LOG_LINES:]
        result = self.runner(
            ["journalctl", "--unit", self.wanted.unit, "--since", f"@{int(since)}", "--no-pager",
             "--output", "cat", "--lines", "400"],
            timeout=30,
        )  # fmt: skip
        return telling(result.stdout.splitlines())

    def _systemctl(self, *words: str, timeout: float) -> None:
        """Run systemctl.

        :raises StateError: when it fails
        """
        result = self.runner(["systemctl", *words], timeout=timeout)
        if not result.ok:
            why = result.error or (result.stderr.strip().splitlines() or ["no words"])[0]
            raise StateError(f"systemctl {' '.join(words)} failed: {why}")


def telling(lines: list[str]) -> list[str]:
    """Return the last lines before systemd's own remarks about the failed unit take over."""
    own = [
        line for line in lines if not re.search(r"\.service: |^(Starting|Stopped|Failed) ", line)
    ]
    return (own or lines)[-_LOG_LINES:]


def cause(log: list[str]) -> str | None:
    """Return the one log line that says why a start failed, if one does."""
    ours = [line for line in log if line.startswith("vllm-turing-host ")]
    error = re.compile(r"\b(\w*(?:Error|Exception|Killed)\b: .+)")
    raised = [match.group(1) for line in log if (match := error.search(line))]
    reasons = list(dict.fromkeys(line.partition(": ")[2] for line in ours))
    if reasons and "the engine ended" not in reasons[-1]:
        return "; ".join(reasons)
    if raised:
        return raised[-1][:300]
    return reasons[-1] if reasons else None


def switch_link(link: str, folder: str) -> None:
    """Point a link at a folder in one rename; there is no moment without the link."""
    draft = Path(f"{link}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder)
    draft.replace(link)


def _fingerprint(folder: str) -> str | None:
    try:
        return str(service_launch.release_of(folder)["fingerprint"])
    except service_launch.LaunchError:
        return None


def _read(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(json.dumps(data), encoding="utf-8")
    draft.replace(path)


def _replace(path: Path, content: str) -> None:
    """Replace a file's content in one rename, keeping its mode and owner."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(content, encoding="utf-8")
    if path.exists():
        found = path.stat()
        draft.chmod(found.st_mode & 0o7777)
        os.chown(draft, found.st_uid, found.st_gid)
    draft.replace(path)
