"""The checks on this very machine, without Ansible: ``vllm-turing-host preflight``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import preflight, preflight_wish
from .preflight_host import Host


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    found = argparse.ArgumentParser(
        prog="preflight",
        description="Check this machine, read only: what would go wrong, and what to do.",
        epilog="Exit status: 0 passed, 1 warnings with --strict, 2 failures.",
    )
    found.add_argument("--json", metavar="FILE", help="write the report here ('-': standard out)")
    found.add_argument("--wish", metavar="FILE", help="JSON with the wanted values (see docs)")
    found.add_argument("--strict", action="store_true", help="warnings count as well")
    found.add_argument("--accept", action="append", default=[], metavar="ID", help="known and fine")
    found.add_argument("--only", action="append", default=[], metavar="ID", help="check or group")
    found.add_argument("--skip", action="append", default=[], metavar="ID", help="check or group")
    found.add_argument("--no-network", action="store_true", help="ask nothing over the network")
    found.add_argument("--list", action="store_true", help="list the checks and end")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and print the table.

    :returns: 0 passed, 1 warnings where they count, 2 failures or unusable arguments
    """
    arguments = parser().parse_args(argv)
    if arguments.list:
        for row in preflight.describe_checks():
            print(f"{row['group']:<9} {row['id']:<18} {row['title']}")
        return 0
    try:
        unknown = sorted(set(arguments.accept) - set(preflight.check_ids()))
        if unknown:
            raise ValueError(f"--accept {unknown[0]!r} is no check; --list shows them")
        report = preflight.run_checks(
            Host(),
            _wish(arguments.wish, network=not arguments.no_network),
            only=arguments.only,
            skip=arguments.skip,
            accept=arguments.accept,
            strict=arguments.strict,
        )
        document = report.as_dict()
        if arguments.json == "-":
            print(json.dumps(document, indent=2, ensure_ascii=False))
            return report.rc
        if arguments.json:
            text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
            Path(arguments.json).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    print(preflight.table(document, colour=sys.stdout.isatty()))
    return report.rc


def _wish(file: str | None, *, network: bool) -> preflight_wish.Wish:
    """Return what the machine is meant to become."""
    wish = preflight_wish.Wish()
    if file:
        try:
            wish = preflight_wish.from_json(Path(file).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--wish {file!r} cannot be used: {error}") from None
    if network:
        return wish
    return preflight_wish.Wish({**wish.values, "preflight_network": False}, wish.site, wish.stack)


if __name__ == "__main__":
    sys.exit(main())
