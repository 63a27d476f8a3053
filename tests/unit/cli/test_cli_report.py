"""The closing report as text."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.progress import Failure, HostState, RunState
from cli.report import closing_report


def shown(state: RunState, interrupted: bool = False, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(closing_report(state, 65.0, Path(".cache/logs/x.log"), interrupted))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def report(**more: Any) -> dict[str, Any]:
    return {"host": "gpu-box", "changed": [], **more}


def test_everything_is_shown() -> None:
    state = RunState()
    state.hosts["localhost"] = HostState(steps=1)
    state.hosts["gpu-box"] = HostState(steps=29, changed=["a", "b"])
    state.reports.append(
        report(
            changed=["driver 580.159.03 installed"],
            versions={"vllm": "0.24.0", "cuda_toolkit": "12.9"},
            kv={"cache_tokens": 207692, "max_concurrency": 2.077},
            completion={"prompt": "Say [hi].", "text": "hi [/bold]", "seconds": 1.234},
            next_steps=["open http://127.0.0.1:8000/v1"],
            tables=[{"columns": ["Prompt", "TTFT (s)"], "rows": [["20K", "13.137"]]}],
        )
    )
    text = shown(state)
    for words in (
        "gpu-box", "driver 580.159.03 installed", "cuda toolkit: 12.9", "207,692", "2.08",
        "Say [hi].", "hi [/bold]", "1.23 s", "open http://127.0.0.1:8000/v1", "13.137",
        "1 host, 30 steps, 2 changed, 1 m 05 s", ".cache/logs/x.log",
    ):  # fmt: skip
        assert words in text, words


def test_without_a_list_of_its_own_the_changed_tasks_are_shown() -> None:
    state = RunState()
    state.hosts["gpu-box"] = HostState(steps=3, changed=["Install the driver", "Start", "Start"])
    state.reports.append({"host": "gpu-box"})
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(closing_report(state, 1.0, Path("x.log"), False, ["look around"]))
    file = console.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    assert text.count("Start") == 1 and "Install the driver" in text and "look around" in text


def test_nothing_changed_is_said() -> None:
    state = RunState()
    state.reports.append(report())
    assert "nothing; the host was as it should be" in shown(state)


def test_a_failure_says_where_and_what() -> None:
    state = RunState()
    state.failures.append(Failure("gpu-box", "Install the driver", "'580' is gone.", "E: x", False))
    text = shown(state)
    assert "gpu-box: failed: Install the driver" in text and "'580' is gone." in text
    assert "failed." in text


def test_an_interrupted_run_says_how_to_go_on() -> None:
    assert "start it again" in shown(RunState(), interrupted=True)


def test_an_empty_answer_is_not_hidden() -> None:
    state = RunState()
    state.reports.append(report(completion={"prompt": "hi", "text": "", "seconds": 1}))
    assert "(empty answer)" in shown(state)


def test_a_narrow_terminal_breaks_nothing() -> None:
    state = RunState()
    state.reports.append(report(changed=["x" * 200], versions={"a" * 60: "b" * 60}))
    assert all(len(line) <= 40 for line in shown(state, width=40).splitlines())
