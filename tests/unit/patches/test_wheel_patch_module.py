"""The Ansible module, run by Ansible on this machine: check, diff, apply, revert, refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.patches.test_wheel_patch import A_FILES, ONE, ONE_A, TWO, data

ROOT = Path(__file__).parents[3]


def module(site: Path, *flags: str, state: str = "applied") -> dict[str, Any]:
    """Run the module and return its result."""
    arguments = {
        "patches": [data("first", A_FILES)],
        "roots": {"site-packages": str(site)},
        "state": state,
    }
    folder = site.parent / "results"
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "ansible"), "-i", "localhost,", "-c", "local"),
            *("localhost", "-m", "wheel_patch", "-a", json.dumps(arguments), *flags),
            *("-e", f"ansible_python_interpreter={sys.executable}", "--tree", str(folder)),
        ],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    answer = folder / "localhost"
    assert answer.exists(), done.stdout + done.stderr
    result: dict[str, Any] = json.loads(answer.read_text())
    answer.unlink()
    return {**result, "rc": done.returncode, "output": done.stdout}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    root = tmp_path / "site-packages"
    (root / "thing").mkdir(parents=True)
    (root / "thing-1.2.3.dist-info").mkdir()
    (root / "thing/one.py").write_bytes(ONE)
    (root / "thing/two.h").write_bytes(TWO)
    return root


def test_check_apply_again_revert(site: Path) -> None:
    checked = module(site, "--check", "--diff")
    assert checked["changed"] is True
    assert (site / "thing/one.py").read_bytes() == ONE
    assert f"+++ after: {site}/thing/one.py" in checked["output"]
    assert "+one three" in checked["output"]
    assert set(checked["changed_paths"]) == {str(site / path) for path in A_FILES}
    assert checked["patches"][0]["state"] == "patched"

    applied = module(site)
    assert applied["changed"] is True and len(applied["changed_paths"]) == len(A_FILES)
    assert (site / "thing/one.py").read_bytes() == ONE_A

    assert module(site)["changed"] is False
    assert module(site, "--check", state="reverted")["changed"] is True
    assert module(site, state="reverted")["changed"] is True
    assert (site / "thing/one.py").read_bytes() == ONE


def test_foreign_file_fails_with_a_sentence(site: Path) -> None:
    (site / "thing/two.h").write_bytes(b"mine\n")
    result = module(site)
    assert result["rc"] != 0
    assert result["msg"].startswith("patch 'first': '") and "\n" not in result["msg"]
    assert result["patches"][0]["state"] == "foreign"
