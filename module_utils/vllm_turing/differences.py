"""Compare the rendered service with a reference unit, and hold the differences to a list.

A difference that the list does not have is a mistake; an entry of the list without a difference is
one too, so that the list and the page made of it stay true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import systemd_unit, vllm_args

#: Compared word by word or variable by variable instead of as text.
_OTHERWISE = {"Service": ("ExecStart", "Environment")}
#: Shown where one side has nothing.
NOTHING = "—"


@dataclass(frozen=True)
class Service:
    """What is compared of a service.

    :ivar keys: ``Section.Key`` to its values, without ExecStart and Environment
    :ivar environment: what the engine effectively gets
    :ivar argv: the engine's effective command line
    """

    keys: Mapping[str, Sequence[str]]
    environment: Mapping[str, str]
    argv: Sequence[str]


@dataclass(frozen=True)
class Entry:
    """One purposeful difference.

    :ivar where: ``unit:Section.Key``, ``environment:NAME``, ``argv:--flag`` or ``argv:command``
    """

    id: str
    where: str
    reference: str
    ours: str
    reason: str


def from_unit(text: str, argv: Sequence[str], environment: Mapping[str, str]) -> Service:
    """Read a unit file.

    :param argv: the command line with configuration files expanded
    :param environment: the environment with what a launcher adds
    """
    unit = systemd_unit.parse(text)
    return Service(systemd_unit.settings(unit, _OTHERWISE), environment, argv)


def found(reference: Service, ours: Service) -> dict[str, tuple[str, str]]:
    """Return every difference: where it is, and both sides as they are shown."""
    differences: dict[str, tuple[str, str]] = {}

    def note(where: str, one: str | None, other: str | None) -> None:
        if one != other:
            differences[where] = (
                NOTHING if one is None else one,
                NOTHING if other is None else other,
            )

    for key in dict.fromkeys([*reference.keys, *ours.keys]):
        note(f"unit:{key}", _lines(reference.keys.get(key)), _lines(ours.keys.get(key)))
    for name in dict.fromkeys([*reference.environment, *ours.environment]):
        note(f"environment:{name}", reference.environment.get(name), ours.environment.get(name))
    program, flags = _split(reference.argv)
    own_program, own_flags = _split(ours.argv)
    note("argv:command", " ".join(program), " ".join(own_program))
    one, other = vllm_args.flags_of(flags), vllm_args.flags_of(own_flags)
    for flag in dict.fromkeys([*one, *other]):
        if one.get(flag) != other.get(flag):
            note(f"argv:{flag}", _values(one.get(flag)), _values(other.get(flag)))
    return differences


def mistakes(listed: Iterable[Entry], differences: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return where list and differences disagree, one sentence each; empty when they agree."""
    wrong: list[str] = []
    known: dict[str, Entry] = {}
    names: set[str] = set()
    for entry in listed:
        if entry.where in known or entry.id in names:
            wrong.append(f"{entry.id}: {entry.where} is listed twice")
        known[entry.where] = entry
        names.add(entry.id)
        if not entry.reason.strip():
            wrong.append(f"{entry.id}: gives no reason")
        if entry.where not in differences:
            wrong.append(
                f"{entry.id}: {entry.where} does not differ (any more); take it off the list"
            )
    for where, (one, other) in differences.items():
        listing = known.get(where)
        if listing is None:
            wrong.append(f"{where} differs and is not listed: reference {one!r}, ours {other!r}")
        elif (listing.reference, listing.ours) != (one, other):
            wrong.append(
                f"{listing.id}: the list says {listing.reference!r} and {listing.ours!r}, "
                f"but it is {one!r} and {other!r}"
            )
    return wrong


def entries(data: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Build the list from decoded YAML."""
    return [
        Entry(
            **{
                name: str(item[name]).strip()
                for name in ("id", "where", "reference", "ours", "reason")
            }
        )
        for item in data
    ]


def page(listed: Iterable[Entry]) -> str:
    """Return docs/differences.md."""
    titles = {"unit": "The unit", "environment": "The environment", "argv": "The command line"}
    lines = [
        "# Where the service differs from the reference host, and why",
        "",
        "<!-- Generated from roles/vllm_service/files/differences.yml by `python -m cli.docs`;",
        "     a test holds this page, the list and the rendered unit in step. -->",
        "",
        "`inventories/reference` renders the service of the reference host. Every difference is",
        "on purpose and listed here; everything else is the same, flag by flag.",
    ]
    grouped: dict[str, list[Entry]] = {}
    for entry in listed:
        grouped.setdefault(entry.where.partition(":")[0], []).append(entry)
    for kind, title in titles.items():
        if kind not in grouped:
            continue
        lines += [
            "",
            f"## {title}",
            "",
            "| what | reference host | here | why |",
            "|---|---|---|---|",
        ]
        for entry in grouped[kind]:
            what = entry.where.partition(":")[2]
            cells = (f"`{what}`", _cell(entry.reference), _cell(entry.ours), _flat(entry.reason))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line before its first long flag."""
    start = next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))
    return list(argv[:start]), list(argv[start:])


def _lines(values: Sequence[str] | None) -> str | None:
    return None if values is None else " ⏎ ".join(values)


def _values(values: Sequence[Any] | None) -> str | None:
    return None if values is None else " ".join(str(value) for value in values) or "set"


def _cell(text: str) -> str:
    return text if text == NOTHING else " ".join(f"`{_flat(part)}`" for part in text.split(" ⏎ "))


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
