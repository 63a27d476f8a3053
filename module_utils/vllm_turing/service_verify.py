"""Compare what the running service shows with what is expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table.

    :ivar expected, found: as they are shown
    """

    name: str
    expected: str
    found: str
    ok: bool

    def as_dict(self) -> dict[str, Any]:
        """Return it as data."""
        return asdict(self)


def flatten(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the probe's result as one level of names, such as ``kv.block_size``."""
    flat: dict[str, Any] = {
        "unit": found.get("unit", {}).get("ActiveState"),
        "restarts": _number(found.get("unit", {}).get("NRestarts")),
        "health": found.get("health", {}).get("ok"),
        "version": found.get("version"),
        "key_required": found.get("key_required"),
        "completion": found.get("completion", {}).get("ok"),
        "gpus": len(found.get("gpus", [])),
    }
    models = found.get("models") or [{}]
    flat["model"] = models[0].get("id")
    flat["max_model_len"] = models[0].get("max_model_len")
    for name, value in found.get("kv", {}).items():
        flat[f"kv.{name}"] = value
    for name, value in found.get("log", {}).items():
        flat[f"log.{name}"] = value
    for name, trip in found.get("round_trips", {}).items():
        flat[f"trip.{name}"] = trip.get("ok")
    for name, value in (found.get("release", {}).get("versions") or {}).items():
        flat[f"release.{name}"] = value
    used = [card.get("memory.used") for card in found.get("gpus", [])]
    if used and all(isinstance(value, int) for value in used):
        flat["gpu_memory_used"] = max(used)
    return flat


def reasons(found: Mapping[str, Any]) -> dict[str, str]:
    """Return why an answer that should be there is not, by the table's names."""
    said = {
        "health": found.get("health", {}).get("reason"),
        "completion": found.get("completion", {}).get("reason"),
    }
    said |= {
        f"trip.{name}": trip.get("reason") for name, trip in found.get("round_trips", {}).items()
    }
    return {name: reason for name, reason in said.items() if reason}


def compare(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[Row]:
    """Return one row for each expectation, in its order.

    :param expected: name (see :func:`flatten`) to a value, or to a mapping with ``min`` and ``max``
    :param found: what the probe returned
    """
    flat = flatten(found)
    why = reasons(found)
    rows = []
    for name, wish in expected.items():
        value = flat.get(name)
        shown = "nothing" if value is None else str(value)
        if name in why:
            shown = f"{shown} ({why[name]})"
        rows.append(Row(name, describe(wish), shown, matches(wish, value)))
    return rows


def describe(wish: Any) -> str:
    """Show an expectation."""
    if isinstance(wish, Mapping):
        parts = [f"at least {wish['min']}" if "min" in wish else "",
                 f"at most {wish['max']}" if "max" in wish else ""]  # fmt: skip
        return ", ".join(part for part in parts if part)
    return str(wish)


def matches(wish: Any, value: Any) -> bool:
    """Whether a value is what is expected; numbers compare as numbers to three decimals."""
    if value is None:
        return False
    if isinstance(wish, Mapping):
        number = _number(value)
        if number is None:
            return False
        low, high = _number(wish.get("min")), _number(wish.get("max"))
        return (low is None or number >= low) and (high is None or number <= high)
    if isinstance(wish, bool) or isinstance(value, bool):
        return str(wish).lower() == str(value).lower()
    one, other = _number(wish), _number(value)
    if one is not None and other is not None:
        return abs(one - other) < 0.001
    return str(wish) == str(value)


def table(rows: list[Row]) -> list[str]:
    """Return the rows as lines of aligned text, expected beside found."""
    header = ("", "what", "expected", "found")
    cells = [
        header,
        *(("ok" if row.ok else "NO", row.name, row.expected, row.found) for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]
        )
        for line in cells
    ]


def _number(value: Any) -> float | None:
    """Return a value as a number, if it is one or spells one."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
