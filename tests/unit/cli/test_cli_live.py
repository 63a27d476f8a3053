"""A real run through ansible-runner, on this machine, in a project of its own."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from cli import live

PLAYBOOK = """\
- name: Small play
  hosts: all
  gather_facts: false
  tasks:
    - name: Read the setting of host keys
      ansible.builtin.command: printenv ANSIBLE_HOST_KEY_CHECKING
      register: setting
      changed_when: false  # it only reads
    - name: Write a file
      ansible.builtin.copy: {content: "x\\n", dest: "{{ playbook_dir }}/out.txt", mode: "0644"}
    - name: Stop
      ansible.builtin.fail: {msg: "The value 'x' is wrong; set y."}
      when: boom is defined
    - name: Say something
      ansible.builtin.debug: {msg: "two of three [cards]\\nare fine"}
    - name: Report
      small_report: {text: "{{ setting.stdout }}"}
"""
REPORT_MODULE = """\
#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule(argument_spec={"text": {"type": "str"}})
module.exit_json(changed=False, report={"host": "here", "changed": [module.params["text"]]})
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "ansible.cfg").write_text("[defaults]\nlibrary = library\ninventory = hosts\n")
    (tmp_path / "hosts").write_text(
        f"here ansible_connection=local ansible_python_interpreter={sys.executable}\n"
    )
    (tmp_path / "play.yml").write_text(PLAYBOOK)
    (tmp_path / "library").mkdir()
    (tmp_path / "library/small_report.py").write_text(REPORT_MODULE)
    return tmp_path


def run(project: Path, *arguments: str) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    status = live.run(project, "play.yml", arguments, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return status, file.getvalue()


def test_progress_report_and_nothing_left_behind(project: Path) -> None:
    before = {path.name for path in project.iterdir()}
    status, text = run(project)
    assert status == 0
    assert "✓ Small play" in text and "4 steps, 1 changed" in text
    assert "two of three [cards]\nare fine\n" in text
    # The report task hands back what Ansible's own process has in its environment.
    assert "True" in text and "host keys" not in text.split("╭")[-1]
    left = {path.name for path in project.iterdir()} - before
    assert left <= {".cache", "out.txt", ".ansible"}
    assert [path.name for path in (project / ".cache").iterdir()] == ["logs"]
    (log,) = (project / ".cache/logs").iterdir()
    assert "TASK [Write a file]" in log.read_text() and "\x1b" not in log.read_text()


def test_the_status_is_ansibles_and_the_message_is_shown(project: Path) -> None:
    status, text = run(project, "-e", "boom=1")
    assert status == 2
    assert "The value 'x' is wrong; set y." in text and "here: failed: Stop" in text


def test_diff_is_shown_when_asked_for(project: Path) -> None:
    status, text = run(project, "--check", "--diff")
    assert status == 0
    assert "+x" in text
    assert not (project / "out.txt").exists()


def test_a_wrong_argument_is_shown_as_ansible_says_it(project: Path) -> None:
    status, text = run(project, "--no-such-option")
    assert status == 2
    assert "no-such-option" in text


def test_secrets_are_not_written_anywhere(project: Path) -> None:
    folder = project / ".cache/run"
    folder.mkdir(parents=True)
    config = live.runner_config(project, folder, "play.yml", [], {"BECOME password": "s3cret"})
    assert "s3cret" in config.expect_passwords.values()
    for path in folder.rglob("*"):
        assert not path.is_file() or "s3cret" not in path.read_text(errors="replace")
    assert not any("s3cret" in word for word in config.command)


def test_what_a_killed_run_left_goes_after_a_day(tmp_path: Path) -> None:
    for name, age in (("run-old", live.STALE_SECONDS + 60), ("run-new", 60)):
        folder = tmp_path / ".cache" / name
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age, time.time() - age))
    with live.private_folder(tmp_path) as own:
        assert own.is_dir()
        assert not (tmp_path / ".cache/run-old").exists()
    assert [path.name for path in (tmp_path / ".cache").iterdir()] == ["run-new"]


def test_a_signal_is_collected_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with live.interruptible() as seen:
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_old_logs_go(tmp_path: Path) -> None:
    folder = tmp_path / ".cache/logs"
    folder.mkdir(parents=True)
    for index in range(live.KEPT_LOGS + 5):
        (folder / f"old-{index:02d}.log").write_text("")
    live.new_log(tmp_path, "site").write_text("")
    assert len(list(folder.iterdir())) == live.KEPT_LOGS
    shutil.rmtree(folder)
