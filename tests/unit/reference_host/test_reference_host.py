"""The rendered service is the reference host's, but for a list of purposeful differences."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from vllm_turing import differences, systemd_unit, vllm_args

ROOT = Path(__file__).resolve().parents[3]
LIST = ROOT / "roles/vllm_service/files/differences.yml"


@pytest.fixture(scope="module")
def listed() -> list[differences.Entry]:
    return differences.entries(yaml.safe_load(LIST.read_text()))


def test_every_difference_is_listed_and_every_entry_is_one(
    listed: list[differences.Entry],
    reference: differences.Service,
    ours: differences.Service,
) -> None:
    assert differences.mistakes(listed, differences.found(reference, ours)) == []


def test_an_unlisted_difference_is_found(
    listed: list[differences.Entry],
    reference: differences.Service,
    ours: differences.Service,
) -> None:
    argv = [word if word != "100000" else "65536" for word in ours.argv]
    other = replace(
        ours, argv=argv, environment={**ours.environment, "OMP_NUM_THREADS": "4"},
        keys={**ours.keys, "Service.RestartSec": ["5"]},
    )  # fmt: skip
    wrong = "\n".join(differences.mistakes(listed, differences.found(reference, other)))
    for where in ("argv:--max-model-len", "environment:OMP_NUM_THREADS", "Service.RestartSec"):
        assert f"{where} differs and is not listed" in wrong


def test_an_entry_that_no_longer_differs_is_found(
    listed: list[differences.Entry],
    reference: differences.Service,
    ours: differences.Service,
) -> None:
    same = replace(ours, keys={**ours.keys, "Service.Type": ["simple"]})
    wrong = differences.mistakes(listed, differences.found(reference, same))
    assert len(wrong) == 1
    assert "Service.Type does not differ" in wrong[0]


def test_the_unit_starts_the_shown_command_through_the_file(
    rendered: Path, ours: differences.Service
) -> None:
    unit = systemd_unit.parse((rendered / "etc/systemd/system/vllm-turing.service").read_text())
    [line] = systemd_unit.values(unit, "Service", "ExecStart")
    words = systemd_unit.split(line)
    command = words[words.index("--") + 1 :]
    assert command[:3] == list(ours.argv[:3])
    assert command[3] == "--config"
    config = yaml.safe_load((rendered / command[4].lstrip("/")).read_text())
    assert vllm_args.same_argv(vllm_args.to_argv(config), ours.argv[3:])
    assert (
        systemd_unit.environment(unit).items()
        <= {**json.loads((rendered / "effective-environment.json").read_text())}.items()
    )


def test_no_stub_library_is_on_the_run_time_path(ours: differences.Service) -> None:
    assert not [value for value in ours.environment.values() if "stubs" in value]


def test_the_page_is_in_step_with_the_list(listed: list[differences.Entry]) -> None:
    page = (ROOT / "docs/differences.md").read_text()
    assert page == differences.page(listed), "run: .venv/bin/python -m cli.docs"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_understands_the_unit_and_finds_it_closed_enough(
    rendered: Path, tmp_path: Path
) -> None:
    # The programs do not exist here; verify() is about everything else.
    text = (rendered / "etc/systemd/system/vllm-turing.service").read_text()
    unit = tmp_path / "vllm-turing.service"
    unit.write_text(text.replace("/opt/vllm-turing/lib/vllm-turing-host", "/bin/true"))
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    security = ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(unit)]
    done = subprocess.run(security, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
