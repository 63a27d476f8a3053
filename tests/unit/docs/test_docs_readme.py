"""The two READMEs say the same: headings, commands, links, tables and lists in step."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def headings(text: str) -> list[tuple[int, str]]:
    """Level and text of each heading outside code."""
    outside = CODE.sub("", text)
    return [(len(m[1]), m[2]) for m in re.finditer(r"^(#+) (.*)$", outside, re.M)]


def commands(text: str) -> list[tuple[str, str]]:
    """Language and text of each code block, comments and trailing spaces taken off."""
    return [
        (language, "\n".join(re.sub(r"\s+# .*$", "", line).rstrip() for line in body.splitlines()))
        for language, body in CODE.findall(text)
    ]


def inline_code(text: str) -> list[str]:
    return sorted(re.findall(r"`([^`\n]+)`", CODE.sub("", text)))


def links(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)]+)\)", text)
    return [link.replace(".zh-CN", "") for link in found if not link.startswith("README")]


def shapes(text: str) -> list[str]:
    """What each line outside code is: a list item, a table row with its columns, a heading."""
    result = []
    for line in CODE.sub("", text).splitlines():
        if line.startswith("|"):
            result.append(f"row {line.count('|')}")
        elif line.startswith("- "):
            result.append("item bold" if line.startswith("- **") else "item")
        elif line.startswith("#"):
            result.append(line.split()[0])
    return result


def test_headings_are_in_step() -> None:
    english, chinese = headings(ENGLISH), headings(CHINESE)
    assert [level for level, _ in english] == [level for level, _ in chinese]
    assert english[0] == chinese[0]
    # Translated, not copied.
    for (_, here), (_, there) in zip(english[1:], chinese[1:], strict=True):
        assert here != there and re.search(r"[\u4e00-\u9fff]", there)


def test_commands_are_the_same() -> None:
    assert commands(ENGLISH) == commands(CHINESE)
    assert len(commands(ENGLISH)) >= 5


def test_names_and_paths_in_the_text_are_the_same() -> None:
    assert inline_code(ENGLISH) == inline_code(CHINESE)


def test_links_lead_to_the_same_pages() -> None:
    assert links(ENGLISH) == links(CHINESE)


def test_lists_and_tables_have_the_same_shape() -> None:
    assert shapes(ENGLISH) == shapes(CHINESE)


def test_a_change_in_one_is_noticed() -> None:
    changed = ENGLISH.replace("./provision verify", "./provision check", 1)
    assert commands(changed) != commands(CHINESE)
    assert headings(ENGLISH + "\n## More\n") != headings(ENGLISH)
    assert shapes(ENGLISH.replace("- **The cards**", "**The cards**")) != shapes(CHINESE)


def test_every_verb_of_an_operator_and_only_verbs_are_shown() -> None:
    from cli.verbs import LAB_ACTIONS, VERBS

    shown = set(re.findall(r"\./provision ([a-z]\w+)", ENGLISH))
    assert shown == set(VERBS) - {"plan", "lock", "lock-model"}
    assert set(re.findall(r"\./provision lab ([a-z]\w+)", ENGLISH)) <= set(LAB_ACTIONS)


@pytest.mark.parametrize("name", ["run.svg", "run.zh-CN.svg"])
def test_the_picture_is_whole_and_follows_the_colour_scheme(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    root = ET.fromstring(text)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    style, dark = text.split("@media (prefers-color-scheme: dark)")
    # Every colour of the light scheme has a dark one: no element is left unreadable.
    for selector in re.findall(r"^\s+(\.[\w-]+|text) \{[^}]*(?:fill|stroke): #", style, re.M):
        assert re.search(rf"{re.escape(selector)} \{{", dark), selector
    for element in root.iter():
        assert 0 <= float(element.attrib.get("x", "0")) <= width
        assert 0 <= float(element.attrib.get("y", "0")) <= height
        assert "href" not in element.attrib  # nothing is loaded from elsewhere


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\](.*)$", text, re.M)
    assert versions and versions[0][0] == "Unreleased"
    for version, date in versions[1:]:
        assert re.fullmatch(r"\d+\.\d+\.\d+", version) and re.fullmatch(r" - \d{4}-\d\d-\d\d", date)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.M)) <= kinds
