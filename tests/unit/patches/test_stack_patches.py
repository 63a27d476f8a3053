"""The patches that we carry: well formed, in step with their folder, fitting each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from vllm_turing import unified_diff, wheel_patch

FOLDER = Path(__file__).parents[3] / "stacks/patches"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and path.name[0] != "_")


def load(name: str) -> wheel_patch.Patch:
    data = yaml.safe_load((FOLDER / name / "patch.yml").read_text())
    diff = (FOLDER / name / f"{name}.diff").read_text()
    return wheel_patch.from_mapping({**data, "diff": diff})


def test_there_are_patches() -> None:
    assert "vllm-flashinfer-sm75-floor" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_well_formed(name: str) -> None:
    patch = load(name)
    assert patch.name == name
    assert {path.name for path in (FOLDER / name).iterdir()} == {"patch.yml", f"{name}.diff"}
    assert patch.upstream
    for diff in unified_diff.parse(patch.diff):
        for hunk in diff.hunks:
            # three lines of context on each side, unless the file ends there
            assert hunk.old[:1] == hunk.new[:1] or hunk.old_start <= 1, diff.path
    assert set(patch.requires) | set(patch.conflicts) <= set(NAMES)
    for other in patch.conflicts:
        assert name in load(other).conflicts, f"'{other}' does not exclude '{name}' in turn"


def test_every_choice_of_the_exclusive_ones_is_a_whole_set() -> None:
    """All patches together, taking each exclusive one in turn, join into chains without a gap."""
    patches = {name: load(name) for name in NAMES}
    for chosen in NAMES:
        taken = [patches[chosen]]
        for patch in patches.values():
            if patch.name != chosen and not any(patch.name in other.conflicts for other in taken):
                taken.append(patch)
        wanted = {name for patch in taken for name in patch.requires}
        if wanted <= {patch.name for patch in taken}:
            assert len(wheel_patch.order(taken)) == len(taken)


def test_default_ones_can_stand_together() -> None:
    defaults = [patch for patch in map(load, NAMES) if patch.default]
    assert wheel_patch.order(defaults)
