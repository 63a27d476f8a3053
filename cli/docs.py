"""Write the generated pages: `python -m cli.docs [--check]`.

docs/roles/<role>.md comes from each role's argument_specs, docs/differences.md from the list of
differences to the reference host.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
LONGEST_DEFAULT = 60
"""Longer defaults get a block of their own below the table."""

MARKUP = re.compile(r"\b([BCEILMOPUV])\(((?:[^()\\]|\\.)*)\)")


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of every generated page; the paths are relative to the project."""
    result = {}
    for spec in sorted(root.glob("roles/*/meta/argument_specs.yml")):
        role = spec.parent.parent.name
        content = yaml.safe_load(spec.read_text(encoding="utf-8"))["argument_specs"]
        result[f"docs/roles/{role}.md"] = page(role, content)
    listed = root / "roles/vllm_service/files/differences.yml"
    if listed.exists():
        result["docs/differences.md"] = differences_page(listed)
    return result


def differences_page(listed: Path) -> str:
    """Return the page about what we do unlike the reference host."""
    sys.path.insert(0, str(ROOT / "module_utils"))
    from vllm_turing import differences as reference

    return reference.page(reference.entries(yaml.safe_load(listed.read_text(encoding="utf-8"))))


def page(role: str, specs: Mapping[str, Any]) -> str:
    """Return the page of one role."""
    main = specs["main"]
    lines = [
        f"# {role}",
        "",
        f"<!-- Generated from roles/{role}/meta/argument_specs.yml by `python -m cli.docs`. -->",
        "",
        sentence(main["short_description"]),
        "",
    ]
    for paragraph in paragraphs(main.get("description")):
        lines += [paragraph, ""]
    others = [name for name in specs if name != "main"]
    if others:
        lines += ["## Entry points", ""]
        lines += [f"- `{name}`: {sentence(specs[name]['short_description'])}" for name in others]
        lines += [""]
    options: dict[str, Any] = {}
    for spec in (main, *(specs[name] for name in others)):
        for name, option in (spec.get("options") or {}).items():
            options.setdefault(name, option)
    if options:
        lines += ["## Variables", "", *variables(options)]
    return "\n".join(lines).rstrip() + "\n"


def variables(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of variables and, below it, the defaults that do not fit into it."""
    yield "| Variable | Type | Default | Description |"
    yield "| --- | --- | --- | --- |"
    long: dict[str, Any] = {}
    for name, option in flattened(options):
        default = ""
        if option.get("required"):
            default = "*required*"
        elif "default" in option:
            default = code(option["default"])
            if len(default) > LONGEST_DEFAULT:
                long[name] = option["default"]
                default = "below"
        text = " ".join(paragraphs(option.get("description")))
        if option.get("choices"):
            text += " One of: " + ", ".join(code(choice) for choice in option["choices"]) + "."
        yield f"| `{name}` | {kind(option)} | {cell(default)} | {cell(text)} |"
    for name, value in long.items():
        yield ""
        yield f"`{name}`:"
        yield ""
        yield "```yaml"
        yield yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=96).rstrip()
        yield "```"


def flattened(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every option, those of dictionaries and lists behind their parent as `parent.child`."""
    for name, option in options.items():
        yield f"{prefix}{name}", option
        if option.get("options"):
            mark = "[]" if option.get("type") == "list" else ""
            yield from flattened(option["options"], f"{prefix}{name}{mark}.")


def kind(option: Mapping[str, Any]) -> str:
    """Return an option's type, with that of its elements."""
    name = str(option.get("type", "str"))
    return f"{name} of {option['elements']}" if option.get("elements") else name


def code(value: object) -> str:
    """Return a value the way it is written in a variables file, as code."""
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def cell(text: str) -> str:
    """Return text that may stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


def paragraphs(description: str | Sequence[str] | None) -> list[str]:
    """Return a description's paragraphs with Ansible's markup turned into Markdown."""
    if description is None:
        return []
    parts = [description] if isinstance(description, str) else list(description)
    return [" ".join(MARKUP.sub(r"`\2`", str(part)).split()) for part in parts]


def sentence(text: str) -> str:
    """Return a text that ends like a sentence."""
    text = " ".join(paragraphs(text))
    return text if text.endswith((".", "!", "?")) else f"{text}."


def differences(root: Path) -> list[str]:
    """Return the paths whose page is missing, old or of a role that is gone."""
    wanted = pages(root)
    candidates = [*(root / "docs/roles").glob("*.md"), root / "docs/differences.md"]
    found = {str(path.relative_to(root)) for path in candidates if path.exists()}
    wrong = found - wanted.keys()
    for path, text in wanted.items():
        if path not in found or (root / path).read_text(encoding="utf-8") != text:
            wrong.add(path)
    return sorted(wrong)


def write(root: Path) -> list[str]:
    """Write the pages that differ and remove those of roles that are gone; return their paths."""
    wanted = pages(root)
    changed = differences(root)
    (root / "docs/roles").mkdir(parents=True, exist_ok=True)
    for path in changed:
        if path in wanted:
            (root / path).write_text(wanted[path], encoding="utf-8")
        else:
            (root / path).unlink()
    return changed


def main(argv: Sequence[str]) -> int:
    """Write the pages, or with --check only tell which differ."""
    parser = argparse.ArgumentParser(prog="python -m cli.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    options = parser.parse_args(argv)
    changed = differences(ROOT) if options.check else write(ROOT)
    for path in changed:
        print(f"{'differs' if options.check else 'wrote'}: {path}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
