"""States, application and undoing of patches, on a small made-up package."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.unit.patches.test_unified_diff import make_diff
from vllm_turing import wheel_patch
from vllm_turing.wheel_patch import Patch, PatchError, State, apply_all, revert_all, states

ONE = b"".join(b"one %d\n" % number for number in range(60))
ONE_A = ONE.replace(b"one 3\n", b"one three\n").replace(b"one 50\n", b"one fifty\n")
ONE_B = ONE_A.replace(b"one 4\n", b"one four\n")
TWO = b"two\n"
TWO_A = b"two, patched\n"
NEW = b"made by the patch\n"


def sha(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def data(
    name: str, files: dict[str, tuple[bytes | None, bytes | None]], **more: Any
) -> dict[str, Any]:
    diff = b""
    for path, (before, after) in files.items():
        part = make_diff(before or b"", after or b"", path=path.encode())
        if before is None:
            part = part.replace(b"--- a/" + path.encode(), b"--- /dev/null", 1)
        if after is None:
            part = part.replace(b"+++ b/" + path.encode(), b"+++ /dev/null", 1)
        diff += part
    return {
        "name": name,
        "package": ["thing", "thing-cpu"],
        "versions": "==1.2.3",
        "reason": "a test",
        "files": [
            {"path": path, "before": sha(before), "after": sha(after)}
            for path, (before, after) in files.items()
        ],
        "diff": diff.decode(),
        **more,
    }


def patch(name: str, files: dict[str, tuple[bytes | None, bytes | None]], **more: Any) -> Patch:
    return wheel_patch.from_mapping(data(name, files, **more))


A_FILES: dict[str, tuple[bytes | None, bytes | None]] = {
    "thing/one.py": (ONE, ONE_A),
    "thing/two.h": (TWO, TWO_A),
    "thing/new.py": (None, NEW),
}
A = patch("first", A_FILES)
B = patch("second", {"thing/one.py": (ONE_A, ONE_B)}, requires=["first"])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    root = tmp_path / "site-packages"
    (root / "thing").mkdir(parents=True)
    (root / "thing-1.2.3+cu129.dist-info").mkdir()
    (root / "other-9.dist-info").mkdir()
    (root / "thing/one.py").write_bytes(ONE)
    (root / "thing/two.h").write_bytes(TWO)
    return root


def roots(site: Path) -> dict[str, Path]:
    return {"site-packages": site}


def names(outcomes: list[wheel_patch.Outcome]) -> dict[str, str]:
    return {outcome.name: outcome.state.value for outcome in outcomes}


def tree(site: Path) -> dict[str, bytes]:
    return {
        path.relative_to(site).as_posix(): path.read_bytes()
        for path in site.rglob("*")
        if path.is_file()
    }


def test_applies_in_order_twice_and_back(site: Path) -> None:
    pristine = tree(site)
    assert names(states([B, A], roots(site))) == {"first": "pristine", "second": "pristine"}

    outcomes = apply_all([B, A], roots(site))
    assert [(o.name, o.before, o.state, o.changed) for o in outcomes] == [
        ("first", State.PRISTINE, State.PATCHED, True),
        ("second", State.PRISTINE, State.PATCHED, True),
    ]
    assert outcomes[0].package == "thing" and outcomes[0].version == "1.2.3+cu129"
    assert (site / "thing/one.py").read_bytes() == ONE_B
    assert (site / "thing/two.h").read_bytes() == TWO_A
    assert (site / "thing/new.py").read_bytes() == NEW

    times = {path: path.stat() for path in (site / "thing").iterdir()}
    again = apply_all([A, B], roots(site))
    assert not any(outcome.changed for outcome in again)
    assert {path: path.stat() for path in (site / "thing").iterdir()} == times

    assert all(outcome.changed for outcome in revert_all([A, B], roots(site)))
    assert tree(site) == pristine


def test_one_of_a_chain(site: Path) -> None:
    apply_all([A], roots(site))
    assert names(states([A, B], roots(site))) == {"first": "patched", "second": "pristine"}
    assert names(apply_all([A, B], roots(site))) == {"first": "patched", "second": "patched"}
    # the first alone cannot be told apart under the second: its file has an unknown digest
    assert names(states([A], roots(site))) == {"first": "foreign"}


def test_check_changes_nothing(site: Path) -> None:
    before = tree(site)
    outcomes = apply_all([A, B], roots(site), check=True)
    assert all(outcome.changed and outcome.state is State.PATCHED for outcome in outcomes)
    assert tree(site) == before
    changes = wheel_patch.file_changes([A], roots(site))
    assert (str(site / "thing/two.h"), TWO, TWO_A) in changes
    assert json.loads(json.dumps([outcome.as_dict() for outcome in outcomes]))


def test_never_writes_through_a_hard_link(site: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cache"
    os.link(site / "thing/two.h", cached)
    apply_all([A], roots(site))
    assert cached.read_bytes() == TWO
    assert (site / "thing/two.h").stat().st_nlink == 1


@pytest.mark.parametrize("old", [1_000_000_000, 4_000_000_000])
def test_a_replaced_file_is_newer_and_keeps_its_mode(site: Path, old: int) -> None:
    """Also when the file claims to be from the future: the compiled kernel may be, too."""
    path = site / "thing/two.h"
    path.chmod(0o640)
    os.utime(path, (old, old))
    apply_all([A], roots(site))
    patched = path.stat()
    assert patched.st_mtime >= old + 1
    assert stat.S_IMODE(patched.st_mode) == 0o640
    revert_all([A], roots(site))
    assert int(path.stat().st_mtime) > int(patched.st_mtime)


def test_foreign_file_stops_everything(site: Path) -> None:
    (site / "thing/two.h").write_bytes(TWO + b"edited by hand\n")
    before = tree(site)
    with pytest.raises(
        PatchError, match=r"two\.h' is neither the released file nor the patched one"
    ):
        apply_all([A, B], roots(site))
    assert tree(site) == before
    assert names(states([A, B], roots(site))) == {"first": "foreign", "second": "pristine"}


def test_half_applied_file_is_named_as_such(site: Path) -> None:
    (site / "thing/one.py").write_bytes(ONE.replace(b"one 3\n", b"one three\n"))
    (outcome,) = states([A], roots(site))
    assert outcome.state is State.FOREIGN
    assert "half-applied: 1 of 2 hunks" in outcome.message


def test_change_in_place_with_another_edit(site: Path) -> None:
    (site / "thing/one.py").write_bytes(ONE_A + b"# note\n")
    (outcome,) = states([A], roots(site))
    assert "something else was edited too" in outcome.message


def test_half_applied_patch_is_completed_or_undone(site: Path) -> None:
    pristine = tree(site)
    (site / "thing/one.py").write_bytes(ONE_A)
    (outcome,) = states([A], roots(site))
    assert outcome.state is State.HALF_APPLIED and not outcome.ok
    assert "apply it again" in outcome.message
    assert names(apply_all([A], roots(site))) == {"first": "patched"}
    (site / "thing/one.py").write_bytes(ONE)
    assert names(revert_all([A], roots(site))) == {"first": "pristine"}
    assert tree(site) == pristine


def test_missing_file_and_link_are_foreign(site: Path, tmp_path: Path) -> None:
    (site / "thing/two.h").unlink()
    assert "does not exist" in states([A], roots(site))[0].message
    (tmp_path / "elsewhere").write_bytes(TWO)
    (site / "thing/two.h").symlink_to(tmp_path / "elsewhere")
    assert "not a plain file" in states([A], roots(site))[0].message


def test_failed_replacement_is_taken_back(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(site)
    real = Path.replace
    calls = 0

    def failing(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device", str(target))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(PatchError, match=r"No space left on device\); nothing was changed"):
        apply_all([A], roots(site))
    assert tree(site) == before


def test_wrong_digest_after_is_found_before_writing(site: Path) -> None:
    wrong = data("first", A_FILES)
    wrong["files"][1]["after"] = "0" * 64
    before = tree(site)
    with pytest.raises(PatchError, match="does not give the sha256"):
        apply_all([wheel_patch.from_mapping(wrong)], roots(site))
    assert tree(site) == before


# --- versions and packages ----------------------------------------------------------------------


def reinstall(site: Path, version: str, name: str = "thing") -> None:
    (site / "thing-1.2.3+cu129.dist-info").rmdir()
    (site / f"{name}-{version}.dist-info").mkdir()


def test_wrong_version(site: Path) -> None:
    reinstall(site, "1.2.4")
    with pytest.raises(PatchError, match=r"is for thing ==1\.2\.3, but '1\.2\.4' is installed"):
        apply_all([A], roots(site))


def test_newer_version_with_a_native_fix(site: Path) -> None:
    reinstall(site, "1.3.0")
    (site / "thing/one.py").write_bytes(b"entirely new\n")
    fixed = patch("first", A_FILES, not_needed_from="1.3")
    before = tree(site)
    (outcome,) = apply_all([fixed], roots(site))
    assert (outcome.state, outcome.changed, outcome.ok) == (State.NOT_NEEDED, False, True)
    assert tree(site) == before
    assert not revert_all([fixed], roots(site))[0].changed


def test_any_of_the_distribution_names(site: Path) -> None:
    reinstall(site, "1.2.3", "thing_cpu")
    (outcome,) = apply_all([A], roots(site))
    assert (outcome.package, outcome.ok) == ("thing-cpu", True)


def test_package_absent_or_twice(site: Path) -> None:
    (site / "thing-1.2.2.dist-info").mkdir()
    assert "make the environment anew" in states([A], roots(site))[0].message
    (site / "thing-1.2.2.dist-info").rmdir()
    (site / "thing-1.2.3+cu129.dist-info").rmdir()
    assert "'thing' or 'thing-cpu' is not installed" in states([A], roots(site))[0].message


def test_root_has_to_be_named_and_there(site: Path) -> None:
    with pytest.raises(PatchError, match="needs the folder 'site-packages'"):
        states([A], {})
    with pytest.raises(PatchError, match="there is no folder"):
        states([A], {"site-packages": site / "absent"})


@pytest.mark.parametrize(
    ("version", "specifiers", "fits"),
    [
        ("0.24.0", "==0.24.0", True),
        ("0.24.0+cu129", "==0.24", True),
        ("0.24.0rc1", "==0.24.0", False),
        ("0.24.0.post1", ">0.24.0", True),
        ("0.24.1", ">=0.24.0,<0.24.1", False),
        ("0.6.16", ">=0.6.2", True),
        ("0.24.0.dev3", "<0.24.0", True),
        ("1.0", "!=1.0", False),
        ("5", "", True),
    ],
)
def test_version_ranges(version: str, specifiers: str, fits: bool) -> None:
    assert wheel_patch.matches(version, specifiers) is fits


# --- source checkouts ---------------------------------------------------------------------------

COMMIT = "3ab27d77d8ca01d7a4718903b726add1a8886c0e"


def test_checkout_is_told_by_its_commit(tmp_path: Path) -> None:
    checkout = tmp_path / "src"
    (checkout / ".git/refs/heads").mkdir(parents=True)
    (checkout / "two.h").write_bytes(TWO)
    (checkout / ".git/HEAD").write_text(COMMIT + "\n")
    mine = patch("checkout", {"two.h": (TWO, TWO_A)}, versions="", root="Source", commit=COMMIT)
    folder = {"Source": checkout}
    (outcome,) = apply_all([mine], folder)
    assert (outcome.state, outcome.version) == (State.PATCHED, COMMIT)

    (checkout / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (checkout / ".git/packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n")
    assert states([mine], folder)[0].version == COMMIT
    (checkout / ".git/refs/heads/main").write_text("f" * 40 + "\n")
    assert "is at commit 'ffff" in states([mine], folder)[0].message


# --- what a list of patches has to keep to ------------------------------------------------------


def test_order_and_its_mistakes() -> None:
    assert [p.name for p in wheel_patch.order([B, A])] == ["first", "second"]
    with pytest.raises(PatchError, match="'second' needs patch 'first'; list it too"):
        wheel_patch.order([B])
    other = patch("other", {"thing/two.h": (TWO, b"x\n")}, conflicts=["first"])
    with pytest.raises(PatchError, match="exclude each other"):
        wheel_patch.order([A, other])
    loose = patch("loose", {"thing/two.h": (TWO, b"x\n")})
    with pytest.raises(PatchError, match="not made on top of the first"):
        wheel_patch.order([A, loose])
    undo = patch("undo", {"thing/two.h": (TWO_A, TWO)}, requires=["first"])
    with pytest.raises(PatchError, match="undo each other"):
        wheel_patch.order([A, undo])
    circle = [
        patch("p", {"f": (TWO, b"1\n")}, requires=["q"]),
        patch("q", {"g": (TWO, b"1\n")}, requires=["p"]),
    ]
    with pytest.raises(PatchError, match="in a circle"):
        wheel_patch.order(circle)
    with pytest.raises(PatchError, match="'first' is listed twice"):
        wheel_patch.order([A, A])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "Bad Name"}, "not 'Bad Name'"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"package": []}, "package is missing"),
        ({"reason": ""}, "reason is a text"),
        ({"versions": "~=1"}, "'~=1' is no version range"),
        ({"not_needed_from": "soon"}, "'soon' is no version number"),
        ({"commit": "abc"}, "commit 'abc' is not 40 hex digits"),
        ({"files": []}, "files is a list"),
        ({"files": [{"path": "/etc/x", "before": None, "after": "0" * 64}]}, "not a plain path"),
        ({"files": [{"path": "../x", "before": None, "after": "0" * 64}]}, "not a plain path"),
        ({"files": [{"path": "x", "before": None, "after": "123"}]}, "not a sha256: '123'"),
        ({"files": [{"path": "x", "before": None, "after": None}]}, "the same before and after"),
        (
            {"files": [{"path": "x", "before": None, "after": "0" * 64}]},
            "is only in its diff|not in its",
        ),
        ({"diff": "nonsense"}, "names no file"),
        ({"requires": [1]}, "requires is a list of names"),
    ],
)
def test_description_mistakes_are_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PatchError, match=sentence):
        wheel_patch.from_mapping({**data("first", A_FILES), **change})


def test_state_needs_no_diff(site: Path) -> None:
    bare = data("first", A_FILES)
    del bare["diff"]
    patches = [wheel_patch.from_mapping(bare, need_diff=False)]
    assert names(states(patches, roots(site))) == {"first": "pristine"}
    (site / "thing/two.h").write_bytes(b"?")
    assert names(states(patches, roots(site))) == {"first": "foreign"}
