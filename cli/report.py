"""The closing report of a run, from the events of its tasks and the final task named Report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cli.progress import Failure, RunState, duration

LONGEST_LIST = 30
LONGEST_TEXT = 1200
LONGEST_MESSAGE = 8000
"""Long enough for a whole table of findings."""


def closing_report(
    state: RunState,
    seconds: float,
    log: Path,
    interrupted: bool,
    next_steps: Sequence[str] = (),
) -> RenderableType:
    """Return what is shown when a run has ended.

    `log` is the file with Ansible's full text; `next_steps` are commands that make sense after a
    run that went well.
    """
    parts: list[RenderableType] = [
        host_panel(
            {"changed": changed_tasks(state, report), "next_steps": list(next_steps), **report}
        )
        for report in state.reports
    ]
    parts += [failure_panel(failure) for failure in state.failures]
    worked = {name for name, host in state.hosts.items() if host.steps}
    hosts = len(worked - {"localhost"} or worked)  # the controller's own checks are not a host
    steps = sum(host.steps for host in state.hosts.values())
    changed = sum(len(host.changed) for host in state.hosts.values())
    summary = Text()
    if interrupted:
        summary.append(
            "interrupted; start it again, it goes on from the state it finds. ", "bold red"
        )
    elif state.failures:
        summary.append("failed. ", "bold red")
    summary.append(
        f"{plural(hosts, 'host')}, {plural(steps, 'step')}, {changed} changed, "
        f"{duration(seconds)}; Ansible's own output: {log}"
    )
    return Group(*parts, summary)


def changed_tasks(state: RunState, report: Mapping[str, Any]) -> list[str]:
    """Return the tasks that changed the host of a report, each once, in their order."""
    host = state.hosts.get(str(report.get("host")))
    return list(dict.fromkeys(host.changed)) if host else []


def plural(count: int, word: str) -> str:
    """Return '1 step' or '2 steps'."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def host_panel(report: Mapping[str, Any]) -> RenderableType:
    """Return the panel of one host's report."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row(
        "changed", bullet_list(report.get("changed"), "nothing; the host was as it should be")
    )
    for key, title in (("versions", "versions"), ("kv", "KV cache")):
        table = report.get(key)
        if isinstance(table, Mapping) and table:
            rows.add_row(title, pairs(table))
    completion = report.get("completion")
    if isinstance(completion, Mapping) and completion:
        rows.add_row("chat completion", completion_text(completion))
    for table in report.get("tables") or ():
        rows.add_row("", columns(table))
    if report.get("next_steps"):
        rows.add_row("next", bullet_list(report.get("next_steps"), ""))
    return Panel(
        rows, title=Text(str(report.get("host", "host")), "bold"), title_align="left", expand=True
    )


def columns(table: Mapping[str, Any]) -> RenderableType:
    """Return a table of `columns` and `rows`; the first column left, the others right."""
    result = Table(box=None, pad_edge=False)
    for index, name in enumerate(table["columns"]):
        result.add_column(str(name), justify="right" if index else "left")
    for row in table["rows"]:
        result.add_row(*map(str, row))
    return result


def bullet_list(items: object, when_empty: str) -> Text:
    """Return a list as lines, cut to a readable length."""
    if isinstance(items, str):
        items = [items]
    if not isinstance(items, Sequence) or not items:
        return Text(when_empty, "dim")
    lines = [str(item) for item in items[:LONGEST_LIST]]
    if len(items) > LONGEST_LIST:
        lines.append(f"… and {len(items) - LONGEST_LIST} more")
    return Text("\n".join(lines))


def pairs(table: Mapping[str, Any]) -> Text:
    """Return names and values on one line each."""
    return Text(
        "\n".join(
            f"{str(key).replace('_', ' ')}: {readable(value)}" for key, value in table.items()
        )
    )


def readable(value: object) -> str:
    """Write a value for people: thousands separated, no trailing digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "unknown"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def completion_text(completion: Mapping[str, Any]) -> Text:
    """Return the question, the answer and the time of the completion that was really made."""
    text = Text()
    if completion.get("prompt"):
        text.append(f"» {completion['prompt']}\n", "dim")
    answer = str(completion.get("text") or "").strip()
    text.append((answer[:LONGEST_TEXT] or "(empty answer)") + "\n", "green")
    seconds = completion.get("seconds")
    if isinstance(seconds, int | float):
        text.append(f"{seconds:.2f} s", "dim")
    return text


def failure_panel(failure: Failure) -> RenderableType:
    """Return the panel of one failed task."""
    text = Text(failure.message[-LONGEST_MESSAGE:])
    if failure.details:
        text.append("\n" + "\n".join(failure.details.splitlines()[-10:])[-LONGEST_TEXT:], "dim")
    word = "unreachable" if failure.unreachable else "failed"
    title = Text(f"{failure.host}: {word}: {failure.task}", "bold red")
    return Panel(text, title=title, title_align="left", border_style="red", expand=True)
