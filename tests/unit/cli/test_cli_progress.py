"""Events in, state out."""

from __future__ import annotations

from typing import Any

import pytest

from cli.progress import RunState, duration, note


def event(kind: str, **data: Any) -> dict[str, Any]:
    return {"event": kind, "event_data": data}


def start(state: RunState, role: str, task: str, now: float, host: str = "box") -> None:
    state.take(event("playbook_on_task_start", role=role, task=task), now)
    state.take(event("runner_on_start", host=host, role=role, task=f"{role} : {task}"), now)


def end(
    state: RunState, kind: str, now: float, task: str = "T", host: str = "box", **res: Any
) -> None:
    state.take(event(kind, host=host, task=task, res=res), now)


def test_consecutive_tasks_of_a_role_are_one_section() -> None:
    state = RunState()
    state.take(event("playbook_on_play_start", name="Provision"), 0)
    for role, task, now in (("a", "one", 1), ("a", "two", 2), ("b", "three", 5)):
        start(state, role, task, now)
        end(state, "runner_on_ok", now + 0.5, changed=task == "two")
    state.take(event("playbook_on_stats", ok={"box": 3}), 9)
    assert [(s.name, s.steps, s.changed, s.started, s.ended) for s in state.finished] == [
        ("a", 2, 1, 1, 5),
        ("b", 1, 0, 5, 9),
    ]
    assert state.section is None


def test_a_section_that_was_skipped_is_no_news() -> None:
    state = RunState()
    start(state, "a", "one", 1)
    end(state, "runner_on_skipped", 1.5)
    start(state, "b", "two", 2)
    assert state.finished == []


def test_what_a_host_does_now() -> None:
    state = RunState()
    start(state, "a", "Wait for the model", 3)
    host = state.hosts["box"]
    assert (host.task, host.since, host.note) == ("Wait for the model", 3, "")
    end(state, "runner_retry", 4, progress="12/40 files, 1.2 GB")
    assert host.note == "12/40 files, 1.2 GB"
    end(state, "runner_retry", 5)  # says nothing: the last word stays
    assert host.note == "12/40 files, 1.2 GB"
    end(state, "runner_on_ok", 6)
    assert host.task == ""
    start(state, "a", "Next", 7)
    assert host.note == ""


def test_a_line_that_a_plugin_prints_is_progress_of_its_host() -> None:
    state = RunState()
    start(state, "hf_model", "Wait for the model", 3)
    line = {"event": "verbose", "stdout": "\x1b[0;34m[box] model: 42 %, 12.3 of 29 GB\x1b[0m\r\n"}
    assert state.is_progress(line)
    state.take(line, 4)
    assert state.hosts["box"].note == "model: 42 %, 12.3 of 29 GB"
    for other in ("[WARNING]: something", "[nobody] 3 %", "box 42 %", ""):
        assert not state.is_progress({"event": "verbose", "stdout": other})


def test_loop_items_say_how_far_the_loop_is() -> None:
    state = RunState()
    start(state, "a", "Measure", 3)
    end(state, "runner_item_on_ok", 4, progress="20K: 88 tok/s", _ansible_item_label="20K")
    assert state.hosts["box"].note == "20K: 88 tok/s"
    end(state, "runner_item_on_ok", 4, _ansible_item_label="60K")
    assert state.hosts["box"].note == "60K"


def test_a_failed_task_is_kept_with_its_message_once() -> None:
    state = RunState()
    start(state, "a", "Loop", 3)
    end(state, "runner_item_on_failed", 4, task="Loop", msg="no space", stderr="trace")
    end(state, "runner_on_failed", 4, task="Loop", msg="One or more items failed", results=[])
    assert [(f.host, f.task, f.message, f.details) for f in state.failures] == [
        ("box", "Loop", "no space", "trace")
    ]


def test_an_ignored_failure_is_none_and_an_unreachable_host_is_one() -> None:
    state = RunState()
    state.take(event("runner_on_failed", host="a", task="T", res={}, ignore_errors=True), 1)
    assert state.failures == []
    end(state, "runner_on_unreachable", 2, msg="ssh: timed out")
    assert state.failures[0].unreachable and state.failures[0].message == "ssh: timed out"


def test_what_debug_tasks_say_is_kept() -> None:
    state = RunState()
    for action, message in (
        ("ansible.builtin.debug", "one\ntwo"), ("debug", ["three", "four"]), ("debug", ""),
        ("ansible.builtin.command", "not this"), ("debug", None),
    ):  # fmt: skip
        state.take(event("runner_on_ok", host="a", task_action=action, res={"msg": message}), 1)
    assert state.messages == ["one\ntwo", "three\nfour"]


def test_the_report_is_found_in_the_result() -> None:
    state = RunState()
    end(state, "runner_on_ok", 1, report={"no": "host"})
    end(state, "runner_on_ok", 1, report={"host": "box", "changed": []})
    assert state.reports == [{"host": "box", "changed": []}]


@pytest.mark.parametrize(
    "odd",
    [{}, {"event": "x"}, {"event": "runner_on_ok", "event_data": None}, event("runner_on_ok"),
     event("runner_on_ok", host="a", res="text"), event("runner_on_ok", host="a")],
)  # fmt: skip
def test_odd_events_do_not_stop_a_run(odd: dict[str, Any]) -> None:
    RunState().take(odd, 0)


def test_the_last_line_is_the_note() -> None:
    assert note({"msg": "one\ntwo\n"}) == "two"
    assert note({"progress": "", "msg": None, "stdout": "x"}) == "x"
    assert note({}) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (61, "1 m 01 s"),
        (3599.9, "1 h 00 m"),
        (7380, "2 h 03 m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
