"""The healthy host passes; whatever is taken away from it, or is odd about it, is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.preflight import fabricated as f
from tests.unit.preflight.fabricated import Box
from vllm_turing import preflight, preflight_cli, preflight_wish
from vllm_turing.preflight_check import GROUPS, registered
from vllm_turing.preflight_host import Answer, Host
from vllm_turing.preflight_wish import Wish
from vllm_turing.run import Result

PROJECT = Path(__file__).parents[3]
SCHEMA = json.loads((PROJECT / "docs/preflight-schema.json").read_text())

#: Every single input of the healthy host: (kind, name).
INPUTS = [
    *(("files", name) for name in f.HEALTHY_FILES),
    *(("links", name) for name in f.HEALTHY_LINKS),
    *(("commands", name) for name in f.HEALTHY_COMMANDS),
    *(("web", name) for name in f.HEALTHY_WEB),
]


def test_healthy_host_passes_everything(tmp_path: Path) -> None:
    report = Box(tmp_path / "host").report(strict=True)
    assert {row["status"] for row in report["checks"]} == {"pass"}
    assert report["rc"] == 0
    assert len(report["checks"]) == len(registered())


@pytest.mark.parametrize(("kind", "name"), INPUTS, ids=lambda part: str(part)[:70])
def test_dropping_any_input_is_noticed(tmp_path: Path, kind: str, name: Any) -> None:
    statuses = Box(tmp_path / "host", **{kind: {name: None}}).statuses()
    assert set(statuses.values()) != {"pass"}


@pytest.mark.parametrize("name", list(f.HEALTHY_COMMANDS), ids=lambda part: " ".join(part)[:60])
def test_a_command_that_hangs_is_noticed(tmp_path: Path, name: tuple[str, ...]) -> None:
    hung = Result(name, None, error="timed out after 15 s")
    report = Box(tmp_path / "host", commands={name: hung}).report()
    assert {row["status"] for row in report["checks"]} != {"pass"}
    assert "the check itself failed" not in json.dumps(report)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chosen=st.sampled_from([part for part in INPUTS if part[0] in ("files", "commands", "web")]),
    junk=st.one_of(st.text(max_size=300), st.just("<nvidia_smi_log><gpu/></nvidia_smi_log>")),
)
def test_junk_in_any_input_never_breaks_a_check(
    tmp_path: Path, chosen: tuple[str, Any], junk: str
) -> None:
    kind, name = chosen
    junk = junk.encode("utf-8", "replace").decode()
    value: Any = junk
    if kind == "commands":
        value = Result(name, 0, junk)
    elif kind == "web":
        value = Answer(200, {"location": junk}, junk.encode())
    report = Box(tmp_path / "host", **{kind: {name: value}}).report()
    assert "the check itself failed" not in json.dumps(report)
    jsonschema.validate(report, SCHEMA)


def test_an_empty_machine_passes_next_to_nothing(tmp_path: Path) -> None:
    def nothing(argv: Any, **_: Any) -> Result:
        return Result(tuple(argv), None, error="not found")

    (tmp_path / "empty").mkdir()
    host = Host(tmp_path / "empty", nothing, fetch=lambda *_, **__: Answer(error="no network"))
    report = preflight.run_checks(host, Wish({"hf_model_path": "/m"})).as_dict()
    passes = {row["id"] for row in report["checks"] if row["status"] == "pass"}
    assert passes <= {"disk_space", "disk_inodes", "network_proxy", "plan_memory"}
    assert report["rc"] == 2


# -- a fresh box -------------------------------------------------------------------------------


def test_fresh_box_has_nothing_that_would_stop_provisioning(tmp_path: Path) -> None:
    report = Box(tmp_path / "host", base="fresh", site=True).report()
    assert report["rc"] == 0
    found = {row["id"]: row for row in report["checks"]}
    assert found["gpu_cards"]["status"] == "pass"
    assert found["plan_context"]["status"] == "pass"
    assert found["nouveau"]["status"] == "warn"
    assert "role nvidia_driver mends it in this run" in found["nouveau"]["summary"]
    for name in ("driver_answers", "cuda_toolkit", "runtime_venv", "model_files"):
        assert found[name]["status"] == "skip", name


def test_fresh_box_without_cards_stops(tmp_path: Path) -> None:
    box = Box(tmp_path / "host", base="fresh", site=True, commands={f.LSPCI: None})
    report = box.report()
    assert report["rc"] == 2
    assert "gpu_cards" in preflight.stop_message(report)


def test_cards_are_seen_in_sysfs_without_lspci(tmp_path: Path) -> None:
    files: dict[str, Any] = {}
    for bus in ("0a", "0b"):
        folder = f"/sys/bus/pci/devices/0000:{bus}:00.0"
        files |= {f"{folder}/vendor": "0x10de\n", f"{folder}/device": "0x1e07\n",
                  f"{folder}/class": "0x030000\n"}  # fmt: skip
    box = Box(tmp_path / "host", base="fresh", commands={f.LSPCI: None}, files=files)
    found = {row["id"]: row for row in box.report()["checks"]}
    assert found["gpu_cards"]["status"] == "pass"
    assert "/sys/bus/pci" in found["gpu_cards"]["summary"]


def test_the_lab_stack_needs_no_cuda(tmp_path: Path) -> None:
    stack = {"cuda": None, "python": ["3.12"], "versions": {}, "forbidden": [], "build_tools": []}
    box = Box(tmp_path / "host", base="fresh", site=True, stack=stack)
    found = box.statuses()
    assert found["cuda_toolkit"] == "skip"
    assert found["network_pytorch"] == "skip"
    assert found["plan_memory"] == "skip"


# -- the report --------------------------------------------------------------------------------


def test_report_fits_its_schema(tmp_path: Path) -> None:
    for base in ("healthy", "fresh"):
        jsonschema.validate(Box(tmp_path / "host", base=base).report(), SCHEMA)


def test_worst_comes_first(tmp_path: Path) -> None:
    box = Box(tmp_path / "host", files={"/sys/fs/cgroup/cgroup.controllers": None,
                                        "/sys/fs/cgroup/cpu/x": "", f"{f.MODEL}/config.json": None,
                                        "/run/systemd/timesync/synchronized": None})  # fmt: skip
    order = [row["status"] for row in box.report()["checks"]]
    assert order == sorted(order, key=["fail", "warn", "skip", "pass"].index)
    assert set(order) == {"fail", "warn", "skip", "pass"}


def test_acceptance_is_shown_and_stops_nothing(tmp_path: Path) -> None:
    links = (f.TI / "nvlink_s.txt").read_text().replace("Link 1: 25.781 GB/s", "Link 1: <inactive>")
    box = Box(tmp_path / "host", commands={f.SMI_LINKS: f.ok(links)})
    assert box.report()["rc"] == 0
    strict = box.report(strict=True)
    assert strict["rc"] == 1
    assert "nvlink_links" in preflight.stop_message(strict)
    accepted = box.report(strict=True, accept=["nvlink_links"])
    assert accepted["rc"] == 0
    assert "(accepted by" in preflight.table(accepted)


def test_accepting_one_failure_leaves_the_others(tmp_path: Path) -> None:
    box = Box(tmp_path / "host", files={f"{f.MODEL}/config.json": None, "/proc/1/comm": "init\n"})
    report = box.report(accept=["init_system"])
    assert report["rc"] == 2
    assert "init_system" not in preflight.stop_message(report)
    assert "model_files" in preflight.stop_message(report)


def test_checks_can_be_chosen_by_id_and_group(tmp_path: Path) -> None:
    host = Box(tmp_path / "host")
    assert set(host.statuses(only=["clock"])) == {"clock"}
    assert set(host.statuses(only=["plan"])) == {"plan_cards", "plan_memory", "plan_context"}
    assert "clock" not in host.statuses(skip=["clock", "hardware"])
    with pytest.raises(ValueError, match="'colck' is neither a check nor a group"):
        host.statuses(only=["colck"])


def test_colour_only_where_wanted(tmp_path: Path) -> None:
    report = Box(tmp_path / "host", base="fresh").report()
    assert "\x1b[31m" in preflight.table(report, colour=True)
    assert "\x1b[" not in preflight.table(report)


def test_nothing_on_the_host_is_changed(tmp_path: Path) -> None:
    box = Box(tmp_path / "host")
    box.report()

    def picture() -> dict[str, tuple[int, float]]:
        return {
            str(p): (p.lstat().st_size, p.lstat().st_mtime) for p in (tmp_path / "host").rglob("*")
        }

    host = box.host()
    before = picture()
    preflight.run_checks(host, Wish({**f.WISH}))
    assert picture() == before


def test_a_check_that_breaks_is_a_warning(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("boom")

    original = registered()["clock"]
    monkeypatch.setitem(
        preflight.registered.__globals__["_REGISTRY"],
        "clock",
        type(original)("clock", "system", "Clock", broken),
    )
    found = {r["id"]: r for r in Box(tmp_path / "host").report()["checks"]}
    assert found["clock"]["status"] == "warn"
    assert "boom" in found["clock"]["summary"]


# -- what must stay in step --------------------------------------------------------------------


def test_defaults_are_those_of_the_roles() -> None:
    roles: dict[str, Any] = {}
    for file in PROJECT.glob("roles/*/defaults/main.yml"):
        roles |= yaml.safe_load(file.read_text()) or {}
    for name, value in preflight_wish.DEFAULTS.items():
        if name in roles and "{{" not in str(roles[name]) and not isinstance(value, dict):
            assert roles[name] == value, name
    arguments = roles.get("vllm_service_args", {})
    for flag, value in preflight_wish.DEFAULTS["vllm_service_args"].items():
        if arguments:
            assert str(arguments[flag]) == str(value), flag


def test_role_hands_in_what_the_checks_read() -> None:
    names = yaml.safe_load((PROJECT / "roles/preflight/vars/main.yml").read_text())
    assert set(names["__preflight_wishes"]) == set(preflight_wish.DEFAULTS)


def test_page_lists_every_check() -> None:
    page = (PROJECT / "docs/preflight.md").read_text()
    for row in preflight.describe_checks():
        assert f"| `{row['id']}` | {row['title']} |" in page
    assert {row["group"] for row in preflight.describe_checks()} == set(GROUPS)


def test_wish_from_json() -> None:
    wish = preflight_wish.from_json('{"values": {"vllm_service_port": "9000"}, "site": true}')
    assert wish.whole("vllm_service_port") == 9000
    assert wish.site
    for text in ("[]", '{"values": 1}', "nonsense"):
        with pytest.raises(ValueError):
            preflight_wish.from_json(text)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    code = preflight_cli.main(["--no-network", "--only", "plan", "--json", str(file)])
    document = json.loads(file.read_text())
    assert code == document["rc"]
    jsonschema.validate(document, SCHEMA)
    assert preflight_cli.main(["--only", "nonsense"]) == 2
    assert "'nonsense' is neither a check nor a group" in capsys.readouterr().err
    assert preflight_cli.main(["--accept", "nonsense"]) == 2
    assert preflight_cli.main(["--wish", str(tmp_path / "absent.json")]) == 2
    assert preflight_cli.main(["--list"]) == 0
    assert "nvlink_links" in capsys.readouterr().out
