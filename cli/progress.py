"""The state of an Ansible run, built from ansible-runner's events; no output, no clock.

An event is a dictionary with `event` (its kind), `event_data` (play, role, task, host, res …) and
`stdout` (what Ansible would print). `RunState.take` is the only entrance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]

NOTE_KEYS = ("progress", "msg", "stdout")
"""Where a waiting task's result says how far it is, best first."""


PROGRESS_LINE = re.compile(r"(?:\x1b\[[\d;]*m)*\[(?P<host>[^\]\s]+)\] (?P<text>[^\x1b\r\n]+)")
"""What our action plugins print while the host works."""

ENDS = ("runner_on_ok", "runner_on_failed", "runner_on_skipped", "runner_on_unreachable")
"""Events after which a host waits for the others."""


@dataclass
class Section:
    """Consecutive tasks of one role (or of a play outside any role)."""

    name: str
    started: float
    steps: int = 0
    changed: int = 0
    failed: int = 0
    ended: float | None = None


@dataclass
class HostState:
    """What one host does now and what it has done."""

    task: str = ""
    since: float = 0.0
    note: str = ""
    steps: int = 0
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A task that failed on a host."""

    host: str
    task: str
    message: str
    details: str = ""
    unreachable: bool = False


class RunState:
    """Everything that the live view and the closing report show."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.play = ""
        self.hosts: dict[str, HostState] = {}
        self.section: Section | None = None
        self.finished: list[Section] = []
        self.failures: list[Failure] = []
        self.messages: list[str] = []
        """What debug tasks say: they are written for the person at the terminal."""
        self.reports: list[Mapping[str, Any]] = []
        self.stats: Mapping[str, Any] = {}

    def take(self, event: Event, now: float) -> None:
        """Take in one event; `now` is a monotonic time in seconds."""
        kind = str(event.get("event", ""))
        if kind == "verbose":
            self._spoken(event)
        data = event.get("event_data")
        if not isinstance(data, Mapping):
            return
        if kind == "playbook_on_play_start":
            self.play = str(data.get("name") or data.get("play") or "")
        elif kind in ("playbook_on_task_start", "playbook_on_handler_task_start"):
            self._enter(str(data.get("role") or self.play), now)
        elif kind == "playbook_on_stats":
            self.stats = data
            self.close(now)
        elif data.get("host"):
            self._host_event(kind, str(data["host"]), data, now)

    def is_progress(self, event: Event) -> bool:
        """Tell whether an event is a line like '[host] 42 % of 29 GB' about a task that goes on."""
        return event.get("event") == "verbose" and self._progress(event) is not None

    def _progress(self, event: Event) -> tuple[HostState, str] | None:
        match = PROGRESS_LINE.match(str(event.get("stdout") or "").strip())
        host = self.hosts.get(match["host"]) if match else None
        return (host, match["text"].strip()) if match and host else None

    def _spoken(self, event: Event) -> None:
        found = self._progress(event)
        if found:
            found[0].note = found[1]

    def close(self, now: float) -> None:
        """End the current section."""
        if self.section is not None:
            self.section.ended = now
            if self.section.steps or self.section.failed:  # what was skipped as a whole is not news
                self.finished.append(self.section)
            self.section = None

    def _enter(self, name: str, now: float) -> None:
        if self.section is None or self.section.name != name:
            self.close(now)
            self.section = Section(name, now)

    def _host_event(self, kind: str, name: str, data: Mapping[str, Any], now: float) -> None:
        host = self.hosts.setdefault(name, HostState())
        task = task_name(data)
        result = data.get("res")
        result = result if isinstance(result, Mapping) else {}
        if kind == "runner_on_start":
            host.task, host.since, host.note = task, now, ""
        elif kind in ENDS:
            host.task = ""
        if kind in ("runner_retry", "runner_on_async_poll"):
            host.note = note(result) or host.note
        elif kind == "runner_item_on_ok":
            host.note = note(result) or item_label(result) or host.note
        elif kind == "runner_on_ok":
            self._ok(host, task, result)
            if str(data.get("task_action")).removeprefix("ansible.builtin.") == "debug":
                self._message(result.get("msg"))
        elif kind in ("runner_on_failed", "runner_item_on_failed", "runner_on_unreachable"):
            self._failed(kind, name, task, data, result)

    def _ok(self, host: HostState, task: str, result: Mapping[str, Any]) -> None:
        host.steps += 1
        changed = bool(result.get("changed"))
        if changed:
            host.changed.append(task)
        if self.section is not None:
            self.section.steps += 1
            self.section.changed += changed
        report = result.get("report")
        if isinstance(report, Mapping) and "host" in report:
            self.reports.append(report)

    def _message(self, content: object) -> None:
        lines = content if isinstance(content, list) else [content]
        if content not in (None, "", []):
            self.messages.append("\n".join(str(line) for line in lines))

    def _failed(
        self, kind: str, host: str, task: str, data: Mapping[str, Any], result: Mapping[str, Any]
    ) -> None:
        if data.get("ignore_errors"):
            return
        if kind == "runner_on_failed" and "results" in result and self.failures[-1:]:
            last = self.failures[-1]
            if (last.host, last.task) == (host, task):  # its items have said it already
                return
        if self.section is not None:
            self.section.failed += 1
        details = "\n".join(
            str(result[key]).strip() for key in ("stderr", "module_stderr") if result.get(key)
        )
        message = str(result.get("msg") or result.get("censored") or "failed without a message")
        unreachable = kind == "runner_on_unreachable"
        self.failures.append(Failure(host, task, message.strip(), details, unreachable))


def task_name(data: Mapping[str, Any]) -> str:
    """Return a task's name without the role that Ansible puts before it."""
    name = str(data.get("task") or "")
    role = str(data.get("role") or "")
    prefix = f"{role} : "
    return name[len(prefix) :] if role and name.startswith(prefix) else name


def note(result: Mapping[str, Any]) -> str:
    """Return the last line in which a result says how far its task is, '' if it says nothing."""
    for key in NOTE_KEYS:
        lines = str(result.get(key) or "").strip().splitlines()
        if lines:
            return lines[-1].strip()
    return ""


def item_label(result: Mapping[str, Any]) -> str:
    """Return the label of the loop item that a result belongs to."""
    label = result.get("_ansible_item_label", result.get("item"))
    return label if isinstance(label, str) else ""


def duration(seconds: float) -> str:
    """Write a time span the short way: 3.4 s, 2 m 05 s, 1 h 02 m."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} m"
