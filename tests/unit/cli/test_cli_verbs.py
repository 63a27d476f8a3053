"""What the launcher decides before .venv exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.verbs import PLAYBOOKS, VERBS, look_at, root_problem, unknown

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("verb", [*PLAYBOOKS, "lab"])
def test_a_verb_needs_the_run_set_only(verb: str) -> None:
    request = look_at([verb, "-i", "inventories/lab"])
    assert (request.verb, request.requirements) == (verb, "requirements.txt")
    assert request.standalone == ()


@pytest.mark.parametrize("verb", ["test", "lock", "lock-model"])
def test_the_developers_verbs_need_the_dev_set(verb: str) -> None:
    assert look_at([verb, "x"]).requirements == "requirements-dev.txt"


@pytest.mark.parametrize("argv", [[], ["--help"], ["sit"], ["site", "--help"], ["lab", "-h"]])
def test_help_and_mistakes_need_no_venv(argv: list[str]) -> None:
    assert look_at(argv).standalone == ("cli", *argv)


def test_a_local_preflight_needs_no_venv() -> None:
    request = look_at(["preflight", "--local", "--json", "x"])
    assert request.standalone == ("vllm_turing.preflight_cli", "--json", "x")


@pytest.mark.parametrize("rest", [["--help"], ["--config", "c.json", "--json"]])
def test_a_plan_needs_no_venv(rest: list[str]) -> None:
    assert look_at(["plan", *rest]).standalone == ("vllm_turing.kv_plan", *rest)


@pytest.mark.parametrize("rest", [[], ["--only", "lint,molecule"], ["--only=molecule"]])
def test_tests_on_the_lab_need_root(rest: list[str]) -> None:
    sentence = root_problem(look_at(["test", *rest]), 1000)
    assert sentence is not None and "--only lint,unit" in sentence
    assert root_problem(look_at(["test", *rest]), 0) is None


def test_other_tests_need_no_root() -> None:
    assert root_problem(look_at(["test", "--only", "lint,unit"]), 1000) is None


def test_only_the_lab_needs_root() -> None:
    sentence = root_problem(look_at(["lab", "down"]), 1000)
    assert sentence is not None and "root" in sentence and "\n" not in sentence
    assert root_problem(look_at(["lab"]), 0) is None
    assert root_problem(look_at(["lab", "--help"]), 1000) is None
    for verb in VERBS.keys() - {"lab", "test"}:
        assert root_problem(look_at([verb]), 1000) is None


def test_the_nearest_word_is_offered() -> None:
    assert "did you mean 'rollback'?" in unknown("verb", "rolback", list(VERBS))
    assert "known are: lab, site" in unknown("verb", "zzz", list(VERBS))


def test_every_playbook_of_a_verb_exists() -> None:
    missing = [path for path in PLAYBOOKS.values() if not (ROOT / path).is_file()]
    assert missing == []


def test_launcher_and_help_use_the_standard_library_alone() -> None:
    # -I -S: neither site-packages nor the environment; what is imported then is the library's.
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from cli import bootstrap, verbs, main\n"
        "sys.exit(main.main(['--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout


def test_the_launcher_tells_an_old_python_in_one_sentence() -> None:
    code = (
        "import runpy, sys\n"
        "sys.version_info = (3, 9, 2, 'final', 0)\n"
        f"sys.argv = ['provision', 'site']\n"
        f"runpy.run_path({str(ROOT / 'provision')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("provision: Python 3.11 or newer is needed")
    assert "is 3.9;" in done.stderr and done.stderr.count("\n") == 1
