"""Pages that are generated are in step, links lead somewhere, the index is whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cli import docs

ROOT = Path(__file__).parents[3]
LINK = re.compile(r"(?<!\\)!?\[[^\]]*\]\(([^)\s]+)\)")


def markdown_pages() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def roles() -> list[str]:
    return sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())


def test_role_pages_are_in_step() -> None:
    assert docs.differences(ROOT) == [], "run: python -m cli.docs"


@pytest.mark.parametrize("role", roles())
def test_every_default_is_described_and_the_same(role: str) -> None:
    folder = ROOT / "roles" / role
    content = yaml.safe_load((folder / "meta/argument_specs.yml").read_text())["argument_specs"]
    options: dict[str, dict[str, object]] = {}
    for entry in content.values():
        options.update(entry.get("options") or {})
    file = folder / "defaults/main.yml"
    defaults = (yaml.safe_load(file.read_text()) or {}) if file.exists() else {}
    assert sorted(defaults.keys() - options.keys()) == [], "not described"
    for name, option in options.items():
        assert option.get("description") and option.get("type"), name
        if name in defaults and "default" in option:
            assert option["default"] == defaults[name], name


@pytest.mark.parametrize("page", list(markdown_pages()), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(without_code(page.read_text())):
        if not re.match(r"[a-z]+:", target):
            path = target.partition("#")[0]
            assert (page.parent / path).exists() if path else True, target


def test_the_index_names_every_page_once() -> None:
    index = ROOT / "docs/README.md"
    targets = LINK.findall(index.read_text())
    named = [(index.parent / t).resolve() for t in targets if t.endswith(".md")]
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - {index.resolve()}
    inside = [path for path in named if (ROOT / "docs").resolve() in path.parents]
    assert sorted(pages - set(inside)) == []
    assert len(inside) == len(set(inside))


def test_every_verb_is_in_the_launchers_page() -> None:
    from cli.verbs import PLAYBOOKS, VERBS

    text = (ROOT / "docs/launcher.md").read_text()
    for verb in VERBS:
        row = rf"\| `{verb}` \|.*"
        found = re.search(row, text)
        assert found, verb
        assert PLAYBOOKS.get(verb, "") in found[0]


# The generator itself.

SPEC = """\
argument_specs:
  main:
    short_description: Small role
    description: [First C(code)., "Second V(x|y)."]
    options:
      small_a: {description: An a., type: str, default: "", choices: ["", auto]}
      small_b:
        description: [A list., Of things.]
        type: list
        elements: dict
        required: true
        options:
          c: {description: 'Has a | in it.', type: int, default: 3}
      small_long: {description: Long., type: list, elements: str, default: [aaaaaaaaaaaaaaaaaaaaa,
        bbbbbbbbbbbbbbbbbbbbbbbbbbb, ccccccccccccccccccccccccccc]}
  install:
    short_description: Install it!
    options:
      small_other: {description: Only here., type: bool, default: false}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "roles/small/meta").mkdir(parents=True)
    (tmp_path / "roles/small/meta/argument_specs.yml").write_text(SPEC)
    return tmp_path


def test_a_page_has_everything(project: Path) -> None:
    page = docs.pages(project)["docs/roles/small.md"]
    for line in (
        "# small",
        "Small role.",
        "First `code`.",
        "- `install`: Install it!",
        '| `small_a` | str | `""` | An a. One of: `""`, `auto`. |',
        "| `small_b` | list of dict | *required* | A list. Of things. |",
        "| `small_b[].c` | int | `3` | Has a \\| in it. |",
        "| `small_long` | list of str | below | Long. |",
        "| `small_other` | bool | `false` | Only here. |",
        "- ccccccccccccccccccccccccccc",
    ):
        assert line in page.splitlines(), line


def test_old_missing_and_leftover_pages_differ(project: Path) -> None:
    assert docs.differences(project) == ["docs/roles/small.md"]
    assert docs.write(project) == ["docs/roles/small.md"]
    assert docs.differences(project) == []
    (project / "docs/roles/gone.md").write_text("x")
    (project / "docs/roles/small.md").write_text("old")
    assert docs.differences(project) == ["docs/roles/gone.md", "docs/roles/small.md"]
    docs.write(project)
    assert docs.differences(project) == []
    assert not (project / "docs/roles/gone.md").exists()
    shutil.rmtree(project / "docs")
