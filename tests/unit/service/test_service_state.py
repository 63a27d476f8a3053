"""The state machine against a systemd of our own, whose start can fail."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import service_launch, service_settings, service_state
from vllm_turing.run import Result
from vllm_turing.service_state import Change, Observed, Plan, StateError, Wanted


class Host:
    """A folder that stands for the host, and a systemctl that does what it is told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []
        self.active = "inactive"
        self.enabled = False
        self.pid = 0
        self.start_fails = 0
        self.log = "INFO loading\nvllm-turing-host gate: port: port 8000 cannot be bound\n"
        for name in ("old", "new"):
            (root / f"releases/{name}").mkdir(parents=True)
            (root / f"releases/{name}/release.json").write_text(json.dumps({"fingerprint": name}))
        (root / "current").symlink_to(root / "releases/old")
        (root / "api-key").write_text("key\n")
        (root / "run").mkdir()
        (root / "etc").mkdir()

    def wanted(self, config: str = "port: 1\n", release: str | None = "old", **more: Any) -> Wanted:
        settings = {
            "name": "t", "host": "127.0.0.1", "port": 1, "model_name": "m", "model_path": "/m",
            "release_link": f"{self.root}/current", "cache_dir": "/c", "config": "/x.yaml",
            "environment_names": ["A"], "gate_timeout": 1, "ready_timeout": 1,
        }  # fmt: skip
        wanted = Wanted(
            name="t", state="started",
            files={f"{self.root}/etc/{name}": text for name, text in
                   (("unit", "[Unit]\n"), ("config", config), ("settings", json.dumps(settings)))},
            unit_path=f"{self.root}/etc/unit", config_path=f"{self.root}/etc/config",
            settings_path=f"{self.root}/etc/settings", unit_digest="u", environment={"A": "1"},
            release=release, release_path=release and f"{self.root}/releases/{release}",
            release_link=f"{self.root}/current", previous_link=f"{self.root}/previous",
            key_path=f"{self.root}/api-key", user="nobody", library="/lib",
            data_dir=f"{self.root}/service", drain_timeout=2,
        )  # fmt: skip
        wanted = replace(wanted, **more)
        for path, text in wanted.files.items():
            Path(path).write_text(text)
        return wanted

    def __call__(self, argv: Sequence[str], **_: Any) -> Result:
        line = " ".join(argv)
        if argv[0] == "journalctl":
            return Result(tuple(argv), 0, self.log)
        if argv[:2] == ["systemctl", "show"]:
            text = (
                f"LoadState=loaded\nActiveState={self.active}\nSubState=x\nMainPID={self.pid}\n"
                f"UnitFileState={'enabled' if self.enabled else 'disabled'}\nNeedDaemonReload=no\n"
            )
            return Result(tuple(argv), 0, text)
        self.calls.append(line.removeprefix("systemctl "))
        verb = argv[1]
        if verb == "start":
            if self.start_fails > 0:
                self.start_fails -= 1
                self.active = "failed"
                return Result(tuple(argv), 1, "", "Job for t.service failed.\n")
            self.active, self.pid = "active", 42
            self.record()
        elif verb == "stop":
            self.active, self.pid = "inactive", 0
            (self.root / "run/applied.json").unlink(missing_ok=True)
        elif verb in ("enable", "disable"):
            self.enabled = verb == "enable"
        return Result(tuple(argv), 0)

    def record(self) -> None:
        """What the launcher would write, from the files that lie there now."""
        config = (self.root / "etc/config").read_text()
        applied = {
            "release": (self.root / "current").resolve().name,
            "config": service_launch.text_digest(config),
            "unit": "u",
            "environment": service_launch.environment_digest({"A": "1"}),
            "key": service_launch.key_digest("key"),
            "model": "/m",
            "pid": self.pid,
        }
        (self.root / "run/applied.json").write_text(json.dumps(applied))

    def bring(self, wanted: Wanted) -> Plan:
        observed = service_state.observe(wanted, self)
        todo = service_state.plan(wanted, observed)
        if todo.changed:
            Change(wanted, observed, self, sleep=lambda seconds: None).carry_out(todo)
        return todo


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(
        service_settings.Settings, "run_dir", property(lambda self: tmp_path / "run")
    )
    return Host(tmp_path)


def test_first_start_then_nothing(host: Host) -> None:
    first = host.bring(host.wanted())
    assert first.steps() == ["enable", "start and wait for a completion"]
    assert host.calls == ["enable t.service", "reset-failed t.service", "start t.service"]
    host.calls.clear()
    second = host.bring(host.wanted())
    assert not second.changed
    assert second.reasons == ()
    assert host.calls == []


def test_a_changed_flag_restarts_once(host: Host) -> None:
    host.bring(host.wanted())
    host.calls.clear()
    todo = host.bring(host.wanted(config="port: 2\n"))
    assert todo.reasons == ("changed flags",)
    assert [call for call in host.calls if call.startswith(("stop", "start"))] == [
        "stop t.service", "start t.service",
    ]  # fmt: skip
    assert not host.bring(host.wanted(config="port: 2\n")).changed


def test_a_comment_restarts_nothing(host: Host) -> None:
    host.bring(host.wanted())
    assert not host.bring(host.wanted(config="# new words\nport: 1\n")).changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unit_digest": "v"}, "changed unit"),
        ({"environment": {"A": "2"}}, "changed environment"),
        ({"key_path": None}, "another API key"),
    ],
)
def test_each_difference_is_named(host: Host, change: dict[str, Any], reason: str) -> None:
    host.bring(host.wanted())
    wanted = host.wanted(**change)
    todo = service_state.plan(wanted, service_state.observe(wanted, host))
    assert todo.reasons == (reason,)
    assert todo.stop and todo.start


def test_a_new_release_is_switched_between_stop_and_start(host: Host) -> None:
    host.bring(host.wanted())
    host.calls.clear()
    todo = host.bring(host.wanted(release="new"))
    assert todo.steps() == [
        "drain and stop", "switch the release", "start and wait for a completion",
    ]  # fmt: skip
    assert (host.root / "current").resolve().name == "new"
    assert (host.root / "previous").resolve().name == "old"
    assert not host.bring(host.wanted(release="new")).changed


def test_a_failed_start_brings_release_and_flags_back(host: Host) -> None:
    host.bring(host.wanted())
    host.start_fails = 1
    with pytest.raises(StateError) as error:
        host.bring(host.wanted(config="port: 2\n", release="new"))
    text = str(error.value)
    assert "t.service did not get ready (another release, changed flags)" in text
    assert "port: port 8000 cannot be bound" in text
    assert text.endswith("the last good state serves again")
    assert error.value.log
    assert host.active == "active"
    assert (host.root / "current").resolve().name == "old"
    assert not (host.root / "previous").exists()
    assert (host.root / "etc/config").read_text() == "port: 1\n"


def test_a_failed_first_start_stays_stopped_and_says_so(host: Host) -> None:
    host.start_fails = 1
    with pytest.raises(StateError, match="there is no other good state"):
        host.bring(host.wanted())
    assert host.active == "inactive"
    assert host.calls[-1] == "stop t.service"


def test_a_last_good_state_that_does_not_start_either_is_told(host: Host) -> None:
    host.bring(host.wanted())
    host.start_fails = 2
    with pytest.raises(StateError, match="does not start either"):
        host.bring(host.wanted(config="port: 2\n"))
    assert host.active == "inactive"


def test_stopped_is_respected_by_every_later_run(host: Host) -> None:
    host.bring(host.wanted())
    stopped = host.wanted(state="stopped")
    assert host.bring(stopped).steps() == ["drain and stop", "disable"]
    assert (host.active, host.enabled) == ("inactive", False)
    assert not host.bring(stopped).changed


def test_paused_stays_enabled(host: Host) -> None:
    host.bring(host.wanted())
    assert host.bring(host.wanted(state="paused")).steps() == ["drain and stop"]
    assert host.enabled
    assert not host.bring(host.wanted(state="paused")).changed


def test_an_engine_started_by_hand_is_replaced(host: Host) -> None:
    host.bring(host.wanted())
    host.pid = 77  # the record is of another process
    wanted = host.wanted()
    todo = service_state.plan(wanted, service_state.observe(wanted, host))
    assert todo.reasons == ("it was started by something else",)


def test_a_failed_unit_is_started_again(host: Host) -> None:
    host.bring(host.wanted())
    host.calls.clear()
    host.active, host.pid = "failed", 0
    assert host.bring(host.wanted()).reasons == ("the last start failed",)
    assert host.calls == ["reset-failed t.service", "start t.service"]


def test_without_a_release_fact_the_present_one_stays(host: Host) -> None:
    host.bring(host.wanted(release=None))
    assert not host.bring(host.wanted(release=None)).changed
    assert (host.root / "current").resolve().name == "old"


def test_a_fresh_box_in_check_mode_has_a_plan(tmp_path: Path) -> None:
    host = Host(tmp_path)
    wanted = replace(host.wanted(), release="abc", release_path="/nowhere", release_link="/nowhere")
    todo = service_state.plan(wanted, Observed())
    assert todo.changed
    assert service_state.check_flags(wanted, Observed(), host) == []


def test_flags_are_checked_once_a_release_and_configuration(host: Host) -> None:
    python = host.root / "releases/old/venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    asked: list[str] = []

    def runner(argv: Sequence[str], **more: Any) -> Result:
        asked.append(more["input"])
        found = ["'x' is no flag of this vLLM"] if "x:" in more["input"] else []
        return Result(tuple(argv), 0, f"noise\n{json.dumps({'problems': found})}\n")

    wanted = host.wanted()
    observed = service_state.observe(wanted, host)
    assert service_state.check_flags(wanted, observed, runner) == []
    assert service_state.check_flags(wanted, observed, runner) == []
    assert len(asked) == 1
    wrong = host.wanted(config="x: 1\n")
    assert service_state.check_flags(wrong, observed, runner) == ["'x' is no flag of this vLLM"]
    assert service_state.check_flags(wrong, observed, runner)
    assert len(asked) == 3


def test_a_check_that_cannot_run_is_an_error_and_not_a_pass(host: Host) -> None:
    python = host.root / "releases/old/venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()

    def runner(argv: Sequence[str], **_: Any) -> Result:
        return Result(tuple(argv), 1, "", "Traceback\nImportError: libcudart.so.13\n")

    wanted = host.wanted()
    with pytest.raises(StateError, match=r"libcudart\.so\.13"):
        service_state.check_flags(wanted, service_state.observe(wanted, host), runner)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (["vllm-turing-host gate: gpus: only 1 of 2 GPUs after 120 s"],
         "gpus: only 1 of 2 GPUs after 120 s"),
        (["(EngineCore pid=9) ERROR torch.OutOfMemoryError: CUDA out of memory.",
          "vllm-turing-host wait-ready: the engine ended 9 s after its start, before it answered"],
         "OutOfMemoryError: CUDA out of memory."),
        (["nothing"], None),
    ],
)  # fmt: skip
def test_the_cause_is_found_in_the_log(log: list[str], said: str | None) -> None:
    assert service_state.cause(log) == said
