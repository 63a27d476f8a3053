"""Our configuration file against the parser of the real vLLM 0.24.0 (CPU build)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.patches import packages
from vllm_turing import vllm_args

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DEFAULTS = yaml.safe_load((ROOT / "roles/vllm_service/defaults/main.yml").read_text())
#: The role's flags, with plain values where it has templates.
REFERENCE = {
    **DEFAULTS["vllm_service_args"],
    "host": "127.0.0.1", "port": 8000, "model": "/srv/it's a model \"100%\"",
    "served-model-name": "qwen-local", "shutdown-timeout": 180,
}  # fmt: skip
WRONG = {
    "max-model-length": 10,
    "dtype": "halff",
    "headless": True,
    "no-headless": True,
    "kv-cache-dtype": "fp8_e4m3",
    "compilation-config": {"cudagraph_mood": "PIECEWISE"},
}


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    texts = {
        "reference": vllm_args.to_yaml(REFERENCE),
        "unpatched": vllm_args.to_yaml(
            {**REFERENCE, "reasoning-config": {"reasoning_start_str": "<think>"}}
        ),
        "wrong": "".join(f"{key}: {json.dumps(value)}\n" for key, value in WRONG.items()),
    }
    python = packages.cpu_environment() / "bin/python"
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT / "module_utils"), "CUDA_VISIBLE_DEVICES": "-1",
        "VLLM_NO_USAGE_STATS": "1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [str(python), str(HERE / "parser_facts.py")],
        input=json.dumps(texts), env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_flags_without_a_no_form_are_known(facts: dict[str, Any]) -> None:
    assert set(facts["switch_on_only"]) == vllm_args.SWITCH_ON_ONLY


def test_vllm_makes_of_the_file_the_argv_that_we_show(facts: dict[str, Any]) -> None:
    assert facts["read"]["reference"] == vllm_args.to_argv(REFERENCE)


def test_the_reference_flags_are_accepted(facts: dict[str, Any]) -> None:
    assert facts["problems"]["unpatched"] == []


def test_without_its_patch_one_value_is_refused(facts: dict[str, Any]) -> None:
    [problem] = facts["problems"]["reference"]
    assert problem.startswith("'reasoning-config'")
    assert "default_thinking_token_budget" in problem


def test_every_mistake_is_told_with_the_nearest_real_flag(facts: dict[str, Any]) -> None:
    told = facts["problems"]["wrong"]
    assert len(told) == 4
    assert "did you mean 'max-model-len'?" in told[0]
    assert "invalid choice: 'halff'" in told[1]
    assert "'headless' has no 'no-' form" in told[2]
    assert "cudagraph_mood" in told[3]
