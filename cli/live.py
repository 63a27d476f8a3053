"""Run a playbook through ansible-runner and show it as it goes, then the closing report."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ansible_runner  # type: ignore[import-untyped]  # it ships no types
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cli import ansible
from cli.progress import Event, RunState, Section, duration
from cli.report import closing_report

KEPT_LOGS = 20
STALE_SECONDS = 24 * 3600


def run(
    root: Path,
    playbook: str,
    arguments: Sequence[str],
    console: Console | None = None,
    next_steps: Sequence[str] = (),
) -> int:
    """Run one playbook with the live view; return Ansible's exit status (130 when interrupted).

    `next_steps` are commands for the closing report of a run that went well.
    """
    console = console or Console()
    passwords = {prompt: getpass.getpass(f"{prompt}: ") for prompt in ansible.prompts(arguments)}
    state, started = RunState(), time.monotonic()
    view = View(state, started)
    verbose = any(re.fullmatch(r"--diff|-D|-v+|--verbose", word) for word in arguments)
    log = new_log(root, Path(playbook).stem)
    with (
        private_folder(root) as folder,
        log.open("w", encoding="utf-8") as log_file,
        interruptible() as interrupted,
        Live(
            get_renderable=view.render, console=console, refresh_per_second=6, transient=True
        ) as live,
    ):

        def handle(event: Event) -> bool:
            text = str(event.get("stdout") or "")
            if text:
                log_file.write(plain(text) + "\n")
            before = len(state.finished)
            state.take(event, time.monotonic())
            for section in state.finished[before:]:
                live.console.print(section_line(section))
            while state.messages:
                message = state.messages.pop(0)
                if not verbose:  # then Ansible's own lines have it
                    live.console.print(coloured(message))
            if text.strip() and (verbose or (is_notice(event) and not state.is_progress(event))):
                live.console.print(coloured(text))
            return False  # no file per event: the log has the text

        config = runner_config(root, folder, playbook, arguments, passwords)
        job = ansible_runner.Runner(
            config, event_handler=handle, cancel_callback=lambda: bool(interrupted)
        )
        _, status = job.run()
        state.close(time.monotonic())
    seconds, shown_log = time.monotonic() - started, log.relative_to(root)
    console.print(closing_report(state, seconds, shown_log, bool(interrupted), next_steps))
    return 130 if interrupted else int(status)


def runner_config(
    root: Path, folder: Path, playbook: str, arguments: Sequence[str], passwords: Mapping[str, str]
) -> ansible_runner.RunnerConfig:
    """Return a prepared configuration; secrets stay in memory and host keys stay checked."""
    environment = ansible.environment(root)
    # ansible-runner switches host-key checking off unless the environment says otherwise.
    environment.setdefault("ANSIBLE_HOST_KEY_CHECKING", "True")
    config = ansible_runner.RunnerConfig(
        private_data_dir=str(folder),
        project_dir=str(root),
        playbook=playbook,
        cmdline=shlex.join(arguments) or None,
        envvars=environment,
        passwords={rf"{prompt}.*:\s*$": value for prompt, value in passwords.items()},
        settings={"pexpect_timeout": 1, "suppress_output_file": True},
        quiet=True,
    )
    config.suppress_ansible_output = True
    config.prepare()
    config.suppress_output_file = True
    return config


@contextmanager
def private_folder(root: Path) -> Iterator[Path]:
    """Give ansible-runner a folder of its own and remove it afterwards, whatever happens."""
    cache = root / ".cache"
    cache.mkdir(exist_ok=True)
    for left in cache.glob("run-*"):  # of a run that was killed
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collect signals that would end us in a list, so that Ansible is stopped first."""
    seen: list[int] = []
    kept = {
        number: signal.signal(number, lambda got, _frame: seen.append(got))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield seen
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def new_log(root: Path, name: str) -> Path:
    """Return the path of this run's log and remove the oldest ones."""
    folder = root / ".cache/logs"
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[
        : -KEPT_LOGS + 1
    ]:
        old.unlink(missing_ok=True)
    return folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def coloured(text: str) -> Text:
    """Return Ansible's text with its colours; its terminal ends lines with CR LF."""
    return Text.from_ansi(text.replace("\r\n", "\n").strip("\n"))


def plain(text: str) -> str:
    """Return Ansible's text without colours."""
    return coloured(text).plain


def is_notice(event: Event) -> bool:
    """Tell whether an event is text of Ansible itself: a warning, an error, its usage."""
    return event.get("event") in ("verbose", "warning", "deprecated", "error", "system_warning")


def section_line(section: Section) -> RenderableType:
    """Return the line of a section that has ended."""
    mark, style = ("✗", "bold red") if section.failed else ("✓", "green")
    if not section.failed and section.changed:
        style = "yellow"
    words = f"{section.steps} step{'s' if section.steps != 1 else ''}"
    if section.changed:
        words += f", {section.changed} changed"
    if section.failed:
        words += f", {section.failed} failed"
    table = grid()
    time_used = duration((section.ended or section.started) - section.started)
    table.add_row(Text(mark, style), Text(section.name), Text(words, "dim"), Text(time_used, "dim"))
    return table


def grid() -> Table:
    """Return the columns that every line of the view shares."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=30, overflow="ellipsis", no_wrap=True)
    table.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
    table.add_column(justify="right", width=10, no_wrap=True)
    table.expand = True
    return table


class View:
    """The live region: what runs now, one line a host, with the time since it began."""

    def __init__(self, state: RunState, started: float) -> None:
        """Show `state`; `started` is the monotonic time of the start."""
        self.state, self.started = state, started
        self.spinner = Spinner("dots")

    def render(self) -> RenderableType:
        """Return the region as it is now."""
        now = time.monotonic()
        rows = grid()
        waiting = "finishing" if self.state.stats else "starting"
        name = self.state.section.name if self.state.section else waiting
        busy: list[tuple[str, Any]] = [
            (host, item) for host, item in self.state.hosts.items() if item.task
        ]
        if not busy:
            rows.add_row(
                self.spinner, Text(name, "bold"), Text(""), Text(duration(now - self.started))
            )
        for index, (host, item) in enumerate(busy):
            words = Text(f"{host}: " if len(busy) > 1 else "")
            words.append(item.task)
            if item.note:
                words.append(f" · {item.note}", "cyan")
            rows.add_row(
                self.spinner,
                Text(name if index == 0 else "", "bold"),
                words,
                Text(duration(now - item.since), "dim"),
            )
        return Group(rows, Text(f"  {duration(now - self.started)} since the start", "dim"))
