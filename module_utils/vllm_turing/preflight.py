"""Run every check on a host and report: which would go wrong, by what it is seen, what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from . import checks as _checks
from . import gpu_facts
from .preflight_check import (
    FAIL,
    GROUPS,
    PACKAGE_QUERY,
    PASS,
    SKIP,
    WARN,
    Check,
    Context,
    Outcome,
    registered,
)
from .preflight_host import Host
from .preflight_wish import Wish

#: Raised when a field of the report changes its meaning; docs/preflight-schema.json describes it.
SCHEMA_VERSION = 1

#: Worst first.
ORDER = (FAIL, WARN, SKIP, PASS)

_COLOURS = {FAIL: "\x1b[31m", WARN: "\x1b[33m", PASS: "\x1b[32m", SKIP: "\x1b[2m"}

# Importing the package is what registers the checks.
_ = _checks.__all__


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    :ivar accepted: named in ``preflight_accept``: shown, but stops nothing
    :ivar mended_by: role that mends it when site.yml follows
    """

    id: str
    group: str
    status: str
    summary: str
    evidence: str = ""
    fix: str = ""
    mended_by: str = ""
    accepted: bool = False


@dataclass(frozen=True)
class Report:
    """All findings about one host, worst first."""

    findings: tuple[Finding, ...]
    strict: bool = False
    seconds: float = 0.0

    @property
    def failures(self) -> list[Finding]:
        """What stops: failures that were not accepted."""
        return [f for f in self.findings if f.status == FAIL and not f.accepted]

    @property
    def warnings(self) -> list[Finding]:
        """Warnings that were not accepted."""
        return [f for f in self.findings if f.status == WARN and not f.accepted]

    @property
    def rc(self) -> int:
        """Exit status: 2 failures, 1 warnings where they count (strict), 0 otherwise."""
        if self.failures:
            return 2
        return 1 if self.strict and self.warnings else 0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, as docs/preflight-schema.json describes it."""
        status = {2: FAIL, 1: WARN, 0: WARN if self.warnings else PASS}[self.rc]
        return {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "rc": self.rc,
            "strict": self.strict,
            "seconds": round(self.seconds, 3),
            "counts": {s: sum(f.status == s for f in self.findings) for s in ORDER},
            "checks": [asdict(finding) for finding in self.findings],
        }


def check_ids() -> list[str]:
    """Return the ids of all checks."""
    return list(registered())


def describe_checks() -> list[dict[str, str]]:
    """Return id, group and title of every check, for the documentation."""
    return [{"id": c.id, "group": c.group, "title": c.title} for c in registered().values()]


def select(only: Collection[str] = (), skip: Collection[str] = ()) -> list[Check]:
    """Return the chosen checks; ids and groups may be named.

    :raises ValueError: for a name that is neither
    """
    every = registered()
    unknown = sorted({*only, *skip} - set(every) - set(GROUPS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is neither a check nor a group; see docs/preflight.md")
    return [
        c
        for c in every.values()
        if (not only or c.id in only or c.group in only) and not (c.id in skip or c.group in skip)
    ]


def run_checks(
    host: Host,
    wish: Wish,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    accept: Iterable[str] = (),
    strict: bool = False,
) -> Report:
    """Run the checks; never raises for anything a host does.

    :param only: ids or groups to run; all when empty
    :param skip: ids or groups to leave out
    :param accept: ids whose failure or warning is known and accepted
    :param strict: whether warnings stop, too
    :raises ValueError: for an unknown id in ``only`` or ``skip``
    """
    start = host.now()
    chosen = select(only, skip)
    context = Context(host, wish)
    # What takes long is started at once and side by side; the checks then find it answered.
    groups = {c.group for c in chosen}
    with ThreadPoolExecutor(max_workers=1) as pool:
        # The network is asked beside the commands.
        asked = pool.submit(_checks.network.answers, context) if "network" in groups else None
        host.prefetch((*gpu_facts.COMMANDS, (PACKAGE_QUERY, 20.0), *_checks.commands(host, wish)))
        if asked is not None:
            asked.exception()
    accepted = set(accept)
    findings = [_finding(c, _run(c, context), wish, c.id in accepted) for c in chosen]
    findings.sort(key=lambda f: (ORDER.index(f.status), f.accepted, GROUPS.index(f.group)))
    return Report(tuple(findings), strict, max(0.0, host.now() - start))


def _run(chosen: Check, context: Context) -> Outcome:
    """Run one check; a mistake in the check is a finding of its own, never a pass."""
    try:
        return chosen.function(context)
    except Exception as error:  # a check must never end the report of the others
        return Outcome(
            WARN,
            f"the check itself failed: {type(error).__name__}: {error}",
            fix="report this; until then look at the matter by hand",
        )


def _finding(chosen: Check, outcome: Outcome, wish: Wish, accepted: bool) -> Finding:
    status, summary = outcome.status, outcome.summary
    if status == FAIL and wish.site and outcome.mended_by:
        status = WARN
        summary = f"{summary} (role {outcome.mended_by} mends it in this run)"
    return Finding(
        chosen.id,
        chosen.group,
        status,
        summary,
        outcome.evidence,
        outcome.fix if status in (FAIL, WARN) else "",
        outcome.mended_by,
        accepted and status in (FAIL, WARN),
    )


# -- the table ---------------------------------------------------------------------------------


def table(report: Mapping[str, Any], *, colour: bool = False, width: int = 100) -> str:
    """Return the report for a terminal, worst first.

    What passed is only counted, what was skipped only named.

    :param report: :meth:`Report.as_dict`
    """
    rows = [row for row in report["checks"] if row["status"] in (FAIL, WARN)]
    widest = max((len(row["id"]) for row in rows), default=0)
    indent = " " * (widest + 7)
    room = max(40, width - len(indent))
    lines: list[str] = []
    for row in rows:
        label = f"{'ok' if row['accepted'] else row['status']:<4}"
        if colour:
            label = f"{_COLOURS[row['status']]}{label}\x1b[0m"
        note = " (accepted by preflight_accept)" if row["accepted"] else ""
        text = _wrap(row["summary"] + note, room) or [""]
        lines.append(f"{label}  {row['id']:<{widest}} {text[0]}")
        more = text[1:]
        for name in ("evidence", "fix"):
            more += _wrap(f"{name}: {row[name]}", room) if row[name] else []
        lines += [indent + line for line in more]
    waiting = [row["id"] for row in report["checks"] if row["status"] == SKIP]
    if waiting:
        lines += _wrap(f"nothing to look at yet: {', '.join(waiting)}", width)
    counts = report["counts"]
    total = ", ".join(f"{counts[status]} {status}" for status in ORDER)
    lines.append(f"{total} ({report['seconds']:.1f} s)")
    return "\n".join(lines)


def _wrap(text: str, width: int) -> list[str]:
    """Wrap at blanks only: commands and addresses stay whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def stop_message(report: Mapping[str, Any]) -> str:
    """Return the one message that a run stops with: each failure and its fix."""
    stops = [
        row
        for row in report["checks"]
        if not row["accepted"]
        and (row["status"] == FAIL or (report["strict"] and row["status"] == WARN))
    ]
    count = "1 check says" if len(stops) == 1 else f"{len(stops)} checks say"
    lines = [f"{count} that this would fail; nothing was changed:"]
    for row in stops:
        lines.append(f"  - {row['id']}: {row['summary']}")
        if row["fix"]:
            lines.append(f"      -> {row['fix']}")
    lines.append("What is known and accepted can be named in preflight_accept.")
    return "\n".join(lines)


__all__ = [
    "Finding",
    "Report",
    "check_ids",
    "describe_checks",
    "run_checks",
    "select",
    "stop_message",
    "table",
]
