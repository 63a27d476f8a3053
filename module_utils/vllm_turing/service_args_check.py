"""Check a configuration file against the parser of the vLLM that is installed.

Runs with the release's own Python (the only one that has vLLM), reads the file's text from
standard input and prints one JSON line: ``{"problems": [...], "vllm": "0.24.0"}``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .vllm_args import ArgsError, nearest, to_argv

#: Longest piece of the parser's own words that is passed on.
_WORDS = 300


class _Refused(Exception):
    """What argparse would have printed before it exits."""


def problems(
    config: Mapping[str, Any],
    known: Sequence[str],
    parse: Callable[[list[str]], str | None],
    parse_file: Callable[[], str | None],
) -> list[str]:
    """Return what is wrong with a configuration, one sentence a flag.

    :param config: the decoded file
    :param known: the parser's flags, without dashes
    :param parse: parses one command line; returns the parser's objection
    :param parse_file: parses the whole file; returns the parser's objection
    """
    found: list[str] = []
    names = set(known)
    for name, value in config.items():
        if name not in names:
            found.append(_unknown(name, names))
            continue
        try:
            objection = parse(to_argv({name: value}))
        except ArgsError as error:
            objection = str(error)
        if objection:
            found.append(f"{name!r}: {_short(objection)} (value {_short(repr(value), 80)})")
    if not found:
        objection = parse_file()
        if objection:
            found.append(f"the flags together: {_short(objection)}")
    return found


def _unknown(name: str, known: set[str]) -> str:
    """Say that a flag does not exist, and which one was probably meant."""
    if name.startswith("no-") and name[3:] in known:
        return f"{name!r} does not exist: {name[3:]!r} has no 'no-' form, so leave it out (null)"
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else "see 'vllm serve --help=all' for the list"
    return f"{name!r} is no flag of this vLLM; {hint}"


def _short(text: str, limit: int = _WORDS) -> str:
    """Put an objection on one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def main(argv: list[str]) -> int:
    """Check the file on standard input with the vLLM of this Python.

    :returns: 0 when the check could be made, whatever it found
    """
    text = sys.stdin.read()
    # vLLM logs to standard output; that is kept for the answer alone.
    with contextlib.redirect_stdout(sys.stderr):
        answer = _check(text)
    print(json.dumps(answer))
    return 0


def _check(text: str) -> dict[str, Any]:
    """Load the installed vLLM's parser and put the file to it."""
    yaml = importlib.import_module("yaml")
    utils = importlib.import_module("vllm.utils.argparse_utils")
    cli = importlib.import_module("vllm.entrypoints.openai.cli_args")
    version = str(importlib.import_module("vllm").__version__)

    def refuse(_: object, message: str) -> None:
        raise _Refused(message)

    # vLLM's parser, which objects instead of ending the process.
    objecting = type("ObjectingParser", (utils.FlexibleArgumentParser,), {"error": refuse})
    parser = cli.make_arg_parser(objecting())

    def attempt(line: list[str]) -> str | None:
        try:
            parsed = parser.parse_args(line)
            if "--config" in line:
                cli.validate_parsed_serve_args(parsed)
        except _Refused as error:
            return str(error)
        except (ValueError, TypeError) as error:
            return str(error) or type(error).__name__
        return None

    known = [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]
    config = yaml.safe_load(text) or {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vllm.yaml"
        path.write_text(text, encoding="utf-8")
        found = problems(config, known, attempt, lambda: attempt(["--config", str(path)]))
    return {"problems": found, "vllm": version}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
