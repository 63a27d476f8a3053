"""From a command line to the ansible-playbook command."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli import ansible, main
from cli.verbs import LAB_NAME

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], bool]]:
    """Collect what would be run instead of running it."""
    seen: list[tuple[str, list[str], bool]] = []

    def take(playbook: str, arguments: list[str], *, plain: bool, **more: Any) -> int:
        seen.append((playbook, list(arguments), plain))
        return 7

    monkeypatch.setattr(main, "run_ansible", take)
    monkeypatch.setenv("PROVISION_CWD", str(ROOT))
    return seen


@pytest.fixture
def lab_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    monkeypatch.setenv(LAB_NAME, "lab")

    def run(command: list[str], **rest: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command[1:])
        return subprocess.CompletedProcess(command, 3 if "down" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_unknown_arguments_are_ansibles(ran: list[Any]) -> None:
    words = ["-i", "inventories/lab", "-e", "a=b", "-e", '{"c": 1}', "--check", "--diff"]
    words += ["--limit", "box", "--tags", "driver", "-K", "-vv", "-e", "@file.yml"]
    assert main.main(["site", *words]) == 7
    assert ran == [("site.yml", words, False)]


@pytest.mark.parametrize("verb", ["preflight", "upgrade", "rollback", "verify", "benchmark"])
def test_each_verb_runs_its_playbook(ran: list[Any], verb: str) -> None:
    assert main.main([verb, "--plain"]) == 7
    assert ran == [(f"playbooks/{verb}.yml", [], True)]


def test_render_needs_a_folder_and_passes_it_absolute(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROVISION_CWD", str(tmp_path))
    main.main(["render", "-i", "inventories/reference", "--dest", "out"])
    assert ran[0][1][-2:] == ["-e", json.dumps({"vllm_host_render_root": str(tmp_path / "out")})]
    with pytest.raises(SystemExit) as caught:
        main.main(["render"])
    assert caught.value.code == 2


def test_preflights_own_options_become_variables(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROVISION_CWD", str(tmp_path))
    main.main(["preflight", "--json", "out.json", "--strict", "-i", "box,"])
    assert ran[0][1] == [
        *["-i", "box,", "-e", json.dumps({"preflight_json": str(tmp_path / "out.json")})],
        *["-e", '{"preflight_strict": true}'],
    ]


def test_lock_is_the_stacks_own_program(lab_calls: list[list[str]]) -> None:
    assert main.main(["lock", "vllm-0.24.0-cpu", "--check"]) == 0
    assert lab_calls == [[str(ROOT / "stacks/lock.py"), "vllm-0.24.0-cpu", "--check"]]


def test_lab_up_boots_the_host_and_provisions_it(
    ran: list[Any], lab_calls: list[list[str]]
) -> None:
    assert main.main(["lab", "-e", "a=b", "--plain"]) == 7
    assert lab_calls == [["-m", "lab", "up", "--name", "lab"]]
    assert ran == [("site.yml", ["-i", "inventories/lab", "-e", "a=b"], True)]


def test_the_name_of_a_lab_reaches_the_inventory(
    ran: list[Any], lab_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAB_NAME, "other")
    main.main(["lab"])
    main.main(["lab", "up", "--name", "second"])
    assert [call[-1] for call in lab_calls] == ["other", "second"]
    assert os.environ[LAB_NAME] == "second"


def test_other_lab_actions_are_the_labs(ran: list[Any], lab_calls: list[list[str]]) -> None:
    assert main.main(["lab", "down", "--all"]) == 3
    assert lab_calls == [["-m", "lab", "down", "--all"]]
    assert ran == []


def test_a_lab_that_does_not_boot_is_not_provisioned(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "lab_program", lambda action, arguments: 4)
    assert main.main(["lab", "up"]) == 4
    assert ran == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sight"], "did you mean 'site'?"),
        (["lab", "dwon"], "did you mean 'down'?"),
        (["test", "--only", "lintt"], "did you mean 'lint'?"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert main.main(argv) == 2
    text = capsys.readouterr().err
    assert words in text and text.count("\n") == 1


def test_inventories_are_meant_from_the_callers_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    words = ["-i", "mine", "-i", "box,", "-i", "inventories/lab", "--inventory=mine", "-e", "mine"]
    mine = str(tmp_path / "mine")
    assert main.resolve_paths(words, tmp_path) == [
        *["-i", mine, "-i", "box,", "-i", "inventories/lab", f"--inventory={mine}", "-e", "mine"]
    ]


def test_what_asks_or_lists_gets_plain_output() -> None:
    assert ansible.wants_plain(["--list-tasks"]) and ansible.wants_plain(["--step"])
    assert not ansible.wants_plain(["--check", "--diff", "-i", "x"])


def test_prompts_are_asked_once() -> None:
    assert ansible.prompts(["-K", "--ask-become-pass", "-k"]) == ["BECOME password", "SSH password"]
    assert ansible.prompts(["-i", "x"]) == []
