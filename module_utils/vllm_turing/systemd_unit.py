"""Read and write systemd unit files by systemd's own rules (systemd.syntax, systemd.service).

Only what this project needs: sections and keys, continuation lines, comments, the quoting of
``ExecStart=`` words and of ``Environment=`` assignments, and the specifiers that must be doubled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: section -> list of (key, value) in file order; a key may come more than once
Unit = dict[str, list[tuple[str, str]]]

_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./^~-]+")


class UnitError(Exception):
    """A unit file or command line that systemd would refuse, in one sentence."""


def parse(text: str) -> Unit:
    """Split a unit file into sections and keys.

    :param text: the file; ``\\`` at the end of a line joins it with the next, and comment lines
        inside such a joined value are dropped, as systemd does
    :raises UnitError: for a line that is neither section, assignment nor comment
    """
    unit: Unit = {}
    section: list[tuple[str, str]] | None = None
    pending = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith(("#", ";")) or (not line and not pending):
            continue
        line = pending + line
        pending = ""
        if line.endswith("\\"):
            pending = line[:-1] + " "
            continue
        if line.startswith("[") and line.endswith("]"):
            section = unit.setdefault(line[1:-1], [])
            continue
        key, mark, value = line.partition("=")
        if not mark or section is None:
            raise UnitError(f"line {number}: {line!r} is no assignment inside a section")
        section.append((key.strip(), value.strip()))
    if pending:
        raise UnitError("the file ends inside a continued line")
    return unit


def values(unit: Unit, section: str, key: str) -> list[str]:
    """Return all values of a key; an empty assignment resets the list, as in systemd."""
    found: list[str] = []
    for name, value in unit.get(section, []):
        if name == key:
            found = [*found, value] if value else []
    return found


def split(text: str, *, specifiers: bool = True) -> list[str]:
    """Split a value into words by systemd's quoting rules.

    :param text: the right side of ``ExecStart=`` or ``Environment=``
    :param specifiers: also turn ``%%`` into ``%`` and, as for command lines, ``$$`` into ``$``
    :raises UnitError: for an open quote or an unknown escape
    """
    words: list[str] = []
    word: list[str] | None = None
    quote = ""
    index = 0
    while index < len(text):
        char = text[index]
        index += 1
        if char == "\\":
            if index >= len(text):
                raise UnitError(f"a backslash ends {text!r}")
            if word is None:
                word = []
            index = _escape(text, index, word)
        elif quote:
            if char == quote:
                quote = ""
            elif word is not None:
                word.append(char)
        elif char in "\"'":
            # The manual promises quotes at the start of a word only; the code (extract-word.c)
            # opens them anywhere, which is how unquoted JSON loses its quotes.
            quote, word = char, word if word is not None else []
        elif char.isspace():
            if word is not None:
                words.append("".join(word))
            word = None
        else:
            if word is None:
                word = []
            word.append(char)
    if quote:
        raise UnitError(f"a quote is left open in {text!r}")
    if word is not None:
        words.append("".join(word))
    if specifiers:
        words = [item.replace("%%", "%").replace("$$", "$") for item in words]
    return words


def _escape(text: str, index: int, word: list[str]) -> int:
    """Append the character that an escape means; return the index after it."""
    char = text[index]
    if char in _ESCAPES:
        word.append(_ESCAPES[char])
        return index + 1
    if char in "\\\"'":
        word.append(char)
        return index + 1
    for letter, digits in (("x", 2), ("u", 4), ("U", 8)):
        code = text[index + 1 : index + 1 + digits]
        if char == letter and re.fullmatch(rf"[0-9a-fA-F]{{{digits}}}", code):
            word.append(chr(int(code, 16)))
            return index + 1 + digits
    raise UnitError(f"'\\{char}' in {text!r} is no escape that systemd knows")


def quote(word: str, *, command: bool = True) -> str:
    """Quote one word so that systemd gives back exactly it.

    :param word: the wanted value; line breaks and other control characters are escaped
    :param command: for ``ExecStart=`` words, where ``$`` starts a variable; ``Environment=`` keeps
        a ``$`` as it is
    """
    escaped = word.replace("%", "%%")
    if command:
        escaped = escaped.replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return escaped
    escaped = escaped.replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(
        f"\\x{ord(char):02x}" if ord(char) < 32 or ord(char) == 127 else char for char in escaped
    )
    return f'"{escaped}"'


def command_line(words: Iterable[str]) -> str:
    """Join words into the value of ``ExecStart=``."""
    return " ".join(quote(str(word)) for word in words)


def assignment(name: str, value: str) -> str:
    """Return the value of one ``Environment=`` line.

    :raises UnitError: for a name that is no variable name
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UnitError(f"vllm_service_environment: {name!r} is no name of an environment variable")
    return quote(f"{name}={value}", command=False)


def environment(unit: Unit, section: str = "Service") -> dict[str, str]:
    """Return the variables that a unit's ``Environment=`` lines set; the last one wins."""
    found: dict[str, str] = {}
    for line in values(unit, section, "Environment"):
        for word in split(line, specifiers=False):
            name, mark, value = word.replace("%%", "%").partition("=")
            if mark:
                found[name] = value
    return found


def settings(unit: Unit, but: Mapping[str, Iterable[str]] | None = None) -> dict[str, list[str]]:
    """Return ``Section.Key`` to its values, for comparing two units key by key.

    :param but: section to keys that are compared in another way and left out here
    """
    skipped = {(section, key) for section, keys in (but or {}).items() for key in keys}
    return {
        f"{section}.{key}": values(unit, section, key)
        for section, pairs in unit.items()
        for key in dict.fromkeys(name for name, _ in pairs)
        if (section, key) not in skipped
    }
