"""Flags of vLLM as data: a mapping becomes the file that ``--config`` reads, and an argv to show.

How vLLM 0.24.0 reads the file (``vllm/utils/argparse_utils.py``, ``load_config_file``): ``true``
becomes the bare flag, ``false`` and an empty list are dropped without a word, a list becomes one
argument an item, a mapping becomes one JSON argument, and everything else is passed as text. The
one trap is ``false``: a switch that is on by default stays on. So ``false`` is written as the
``no-`` form here, except for the few flags that have none.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Flags of vLLM 0.24.0 that can only be switched on: there is no ``--no-`` form, and leaving them
#: out is their "false". An integration test compares this with the installed parser.
SWITCH_ON_ONLY = frozenset(
    {
        "aggregate-engine-logging",
        "data-parallel-multi-port-external-lb",
        "disable-log-stats",
        "grpc",
        "headless",
    }
)

#: Flags that would put a secret into a world-readable file or make vLLM read another file.
REFUSED = {
    "api-key": "the key is generated on the host; see vllm_service_api_key_enabled",
    "config": "this project writes the one configuration file itself",
    "hf-token": "the model is a local folder and needs no token",
}

_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
#: What YAML 1.1 (PyYAML) would fold, refuse or read as a line break inside double quotes.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")

#: Words that YAML 1.1 reads as a truth value or as null.
_RESERVED = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


class ArgsError(Exception):
    """A flag that cannot be written, in one sentence."""


def normalise(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping as vLLM gets it: nulls gone, ``false`` in its ``no-`` form.

    :param args: flag names (with ``-`` or ``_``, without leading dashes) and their values
    :returns: the same order; values are ``True``, numbers, text, non-empty lists or mappings
    :raises ArgsError: for a name or a value that vLLM's file cannot carry
    """
    wanted: dict[str, Any] = {}
    for key, value in args.items():
        name = str(key).replace("_", "-")
        if not _NAME.fullmatch(name):
            raise ArgsError(
                f"vllm_service_args: {key!r} is no flag name; "
                "write it without leading dashes, such as 'max-model-len'"
            )
        if name in REFUSED:
            raise ArgsError(f"vllm_service_args: {name!r} cannot be set here: {REFUSED[name]}")
        if value is None:
            continue
        if value is False:
            if name in SWITCH_ON_ONLY:
                continue
            name, value = (name[3:], True) if name.startswith("no-") else (f"no-{name}", True)
        if isinstance(value, (list, tuple)):
            value = list(value)
            if not value:
                continue
            if any(isinstance(item, (list, tuple, Mapping)) or item is None for item in value):
                raise ArgsError(
                    f"vllm_service_args: the list of {name!r} holds {value!r}; "
                    "only numbers and texts can be passed one by one"
                )
        if name in wanted:
            raise ArgsError(f"vllm_service_args: {name!r} is given twice; keep one of the two")
        opposite = name[3:] if name.startswith("no-") else f"no-{name}"
        if opposite in wanted:
            raise ArgsError(
                f"vllm_service_args: both {opposite!r} and {name!r} are given; keep one of the two"
            )
        wanted[name] = value
    return wanted


def merge(args: Mapping[str, Any], custom: Mapping[str, Any]) -> dict[str, Any]:
    """Lay an operator's flags over the role's.

    :param args: the role's own flags
    :param custom: what replaces or, with null, removes them; a ``no-`` form replaces its opposite
    :returns: the mapping that :func:`normalise` takes; nested mappings are replaced as a whole
    """
    merged = {str(key).replace("_", "-"): value for key, value in args.items()}
    for key, value in custom.items():
        name = str(key).replace("_", "-")
        opposite = name[3:] if name.startswith("no-") else f"no-{name}"
        merged.pop(opposite, None)
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def to_yaml(args: Mapping[str, Any]) -> str:
    """Write the file that ``--config`` reads.

    Every text is quoted and every number written so that YAML 1.1 and JSON read the same value;
    mappings stay mappings, one key a line.

    :param args: as for :func:`normalise`
    :returns: the file's text, one flag after another in the order given, without comments
    """
    lines: list[str] = []
    for name, value in normalise(args).items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{name}:")
            lines.extend(_block(value, 1, name))
        else:
            lines.append(f"{name}: {_flow(value, name)}")
    return "".join(f"{line}\n" for line in lines)


def to_argv(args: Mapping[str, Any]) -> list[str]:
    """Return the argv that vLLM makes of the file, in its order.

    :param args: as for :func:`normalise`
    """
    argv: list[str] = []
    for name, value in normalise(args).items():
        argv.append(f"--{name}")
        if value is True:
            continue
        if isinstance(value, list):
            argv.extend(_text(item) for item in value)
        elif isinstance(value, Mapping):
            argv.append(json.dumps(value))
        else:
            argv.append(_text(value))
    return argv


def same_argv(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two command lines of vLLM mean the same (order of flags and JSON spelling aside)."""
    return flags_of(one) == flags_of(other)


def flags_of(argv: Iterable[str]) -> dict[str, list[Any]]:
    """Group a vLLM command line by flag.

    :param argv: the arguments after the program; ``--name=value`` is understood
    :returns: flag name to its values; a value that is a JSON object or list is decoded, so that
        two spellings of one value compare equal
    """
    flags: dict[str, list[Any]] = {}
    current: list[Any] = flags.setdefault("", [])
    for word in argv:
        if word.startswith("--"):
            name, mark, value = word.partition("=")
            current = flags.setdefault(name.replace("_", "-"), [])
            if mark:
                current.append(_decoded(value))
        else:
            current.append(_decoded(word))
    if not flags[""]:
        del flags[""]
    return flags


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the real flag that a mistyped one was probably meant to be, if any is near.

    :param name: what was written, without leading dashes
    :param known: the parser's own flags, without leading dashes
    """
    pool = sorted(set(known))
    found = difflib.get_close_matches(name, pool, n=1, cutoff=0.6)
    if found:
        return found[0]
    # The same words in another order or number, such as 'model-len' for 'max-model-len'.
    words = set(name.split("-"))
    shared = {flag: _overlap(words, set(flag.split("-"))) for flag in pool}
    best = max(pool, key=lambda flag: shared[flag], default=None)
    return best if best is not None and shared[best] >= 0.5 else None


def _overlap(one: set[str], other: set[str]) -> float:
    """Return the share of words that two names have in common, from 0 to 1."""
    return len(one & other) / len(one | other)


def _decoded(word: str) -> Any:
    """Return a JSON object or list as its value, anything else as the text it is."""
    if word[:1] in "{[" and word:
        try:
            return json.loads(word)
        except ValueError:
            return word
    return word


def _text(value: Any) -> str:
    """Spell a scalar as vLLM's ``str()`` of the parsed YAML does."""
    return str(value)


def _block(mapping: Mapping[str, Any], depth: int, name: str) -> Iterable[str]:
    """One nested mapping, one key a line."""
    pad = "  " * depth
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield f"{pad}{_key(str(key), name)}:"
            yield from _block(value, depth + 1, name)
        else:
            yield f"{pad}{_key(str(key), name)}: {_flow(value, name)}"


def _key(key: str, name: str) -> str:
    """Write a key, without quotes where YAML 1.1 cannot mistake it for something else."""
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", key) and key.lower() not in _RESERVED
    return key if plain else _scalar(key, name)


def _flow(value: Any, name: str) -> str:
    """Write a value in flow style, which in our spelling is JSON."""
    if isinstance(value, Mapping):
        inner = (f"{_scalar(str(key), name)}: {_flow(item, name)}" for key, item in value.items())
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(item, name) for item in value) + "]"
    return _scalar(value, name)


def _scalar(value: Any, name: str) -> str:
    """One scalar, the same in YAML 1.1 and JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ArgsError(f"vllm_service_args: {name!r} holds {value!r}, which is no number")
        text = repr(float(value))
        mantissa, mark, exponent = text.partition("e")
        if mark:
            # YAML 1.1 takes '1e-05' for a text: it wants a dot and a signed exponent.
            mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
            exponent = exponent if exponent[0] in "+-" else f"+{exponent}"
            text = f"{mantissa}e{exponent}"
        return text
    if isinstance(value, str):
        quoted = json.dumps(str(value), ensure_ascii=False)
        return _ESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", quoted)
    raise ArgsError(
        f"vllm_service_args: {name!r} holds {value!r} of type {type(value).__name__}; "
        "use texts, numbers, true or false, lists and mappings"
    )
