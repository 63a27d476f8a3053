"""What the patched vLLM does, run for real on its CPU build, before and after.

pytest tests/integration/patches/test_behaviour.py
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.integration.patches import packages
from vllm_turing import wheel_patch

SCRIPTS = Path(__file__).parent / "behaviour"


@functools.cache
def python() -> Path:
    return packages.cpu_environment() / "bin/python"


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give vLLM with all patches of the CPU stack, to be imported before the environment's."""
    target = tmp_path_factory.mktemp("patched") / "site"
    site = packages.overlay(packages.site_packages(packages.cpu_environment()), target)
    names = [name for name in packages.names("vllm-0.24.0-cpu") if name.startswith("vllm-")]
    wheel_patch.apply_all(packages.load(*names), {"site-packages": site})
    return site


# --- default thinking budget --------------------------------------------------------------------


def test_thinking_budget_is_refused_before(model: Path) -> None:
    answer = packages.run_json(python(), SCRIPTS / "thinking_budget.py", str(model), first=[])
    assert "default_thinking_token_budget" in answer["refused"]
    assert "Unexpected keyword argument" in answer["refused"]


def test_thinking_budget_reaches_the_request(model: Path, patched: Path) -> None:
    answer = packages.run_json(
        python(), SCRIPTS / "thinking_budget.py", str(model), first=[patched]
    )
    assert answer["none"] == 512
    assert answer["own"] == 7
    assert answer["zero"] == 0
    assert answer["unlimited"] is None
    assert answer["no_default"] is None
    assert answer["no_default_unlimited"] is None
    assert "greater than or equal to 0" in answer["negative"]
    assert "not yet supported by the V2 model runner" in answer["v2"]
    assert "Please set --reasoning-parser" in answer["tokens_unknown"]
    assert "-1 for unlimited" in answer["minus_two"]


# --- floor, GDN backend, sync mode, MTP draft ---------------------------------------------------


def test_small_places_before() -> None:
    answer = packages.run_json(python(), SCRIPTS / "small_patches.py", first=[])
    assert answer["floors"]["7.5"] is False
    assert answer["known"] == [False, False]
    # the unknown name, and ours, are taken without a word
    assert answer["backends"]["sm75 'flashqla' 128/128"] == ["flashqla", "triton"]
    assert answer["backends"]["sm75 'flashqla_legacy' 128/128"] == ["flashqla_legacy", "triton"]


@pytest.fixture(scope="session")
def answers(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give the answers of the patched places, with the patched stand-in of FlashQLA."""
    from lab import git_mirror

    checkout = tmp_path_factory.mktemp("src") / "FlashQLA"
    for path, text in git_mirror.FILES.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(text)
    wheel_patch.apply_all(packages.load("flashqla-sm75-import-lab"), {"FlashQLA": checkout})
    return packages.run_json(python(), SCRIPTS / "small_patches.py", first=[patched, checkout])


def test_flashinfer_floor(answers: Any) -> None:
    allowed = [capability for capability, good in answers["floors"].items() if good]
    assert allowed == ["7.5", "8.0", "9.0", "12.1"]


def test_gdn_backend_names(answers: Any) -> None:
    backends = answers["backends"]
    for where in ("cpu", "sm75", "sm90"):
        for name in ("'flashqla'", "''"):
            assert backends[f"{where} {name} 128/128"].startswith(
                f"ValueError: Unknown gdn_prefill_backend {name} in --additional-config; use one of"
            )
        assert backends[f"{where} 'triton' 128/128"] == ["triton", "triton"]
    assert backends["sm75 'auto' 128/128"] == ["auto", "triton"]
    assert backends["sm90 'auto' 128/128"] == ["auto", "flashinfer"]
    for name in ("'flashqla_legacy'", "'FlashQLA_Legacy '"):
        assert backends[f"sm75 {name} 128/128"] == ["flashqla_legacy", "flashqla_legacy"]
        assert "heads of one size" in backends[f"sm75 {name} 128/64"]
        assert backends[f"cpu {name} 128/128"] == ["flashqla_legacy", "triton"]


def test_gdn_backend_without_flashqla_is_an_error(patched: Path) -> None:
    answer = packages.run_json(python(), SCRIPTS / "gdn_without_flashqla.py", first=[patched])
    assert answer["error"].startswith(
        "ImportError: gdn_prefill_backend 'flashqla_legacy' needs FlashQLA"
    )
    assert "PYTHONPATH" in answer["error"]


def test_gdn_ragged_batch_against_the_recurrence(answers: Any) -> None:
    """Sequence by sequence, in float32, with the state as [value, key]."""
    error, output, state, shape = answers["ragged"]["torch.float32"]
    assert error < 1e-6 and (output, state) == ("torch.float32", "torch.float32")
    assert shape == [1, 23, 6, 16]
    error, output, state, _shape = answers["ragged"]["torch.float16"]
    # inputs and output rounded to float16: 2^-11 each
    assert error < 1e-3 and (output, state) == ("torch.float16", "torch.float32")
    assert answers["ragged"]["one"] < 1e-6
    assert max(answers["op"]) < 1e-6


def test_sync_mode(answers: Any) -> None:
    sync = answers["sync"]
    waits = sorted(key for key, value in sync.items() if value is True)
    assert waits == ["None 75 3", "auto 75 3", "safe 75 3", "safe 80 3"]
    assert {value for key, value in sync.items() if key.startswith("fast")} == {
        "ValueError: Invalid value 'fast' for VLLM_SM75_SPEC_SYNC_MODE."
        " Valid options: ['auto', 'safe', 'nosync']."
    }


def test_mtp_draft(answers: Any) -> None:
    kept = {key for key, value in answers["drafts"].items() if value}
    assert kept == {"0 fp8", "0 awq", "1 fp8"}


# --- prefix caching with MTP --------------------------------------------------------------------


def wrong(turns: list[dict[str, Any]], block_size: int) -> list[dict[str, Any]]:
    """Hits that claim blocks which some group has not, or end in a state that is not there."""
    return [
        turn
        for turn in turns
        if any(blocks * block_size != turn["hit_tokens"] for blocks in turn["blocks"])
        or not all(turn["last_block_is_real"])
    ]


def sweep(model: Path, block_size: int, drafts: int, first: list[Path]) -> list[dict[str, Any]]:
    answer = packages.run_json(
        python(),
        SCRIPTS / "hybrid_cache_hit.py",
        *(str(model), str(block_size), str(drafts)),
        first=first,
    )
    turns: list[dict[str, Any]] = answer["turns"]
    assert len(turns) > 50
    return turns


@pytest.mark.parametrize("block_size", [1600, 800], ids=["fp8 cache", "fp16 cache"])
def test_cache_hit_is_backed_by_every_group(model: Path, patched: Path, block_size: int) -> None:
    before = sweep(model, block_size, 3, [])
    after = sweep(model, block_size, 3, [patched])
    assert len(wrong(before, block_size)) > 20
    assert wrong(after, block_size) == []
    total = sum(turn["second"] for turn in after)
    rates = [sum(turn["hit_tokens"] for turn in turns) / total for turns in (before, after)]
    print(
        f"\nblock {block_size}: {len(wrong(before, block_size))} of"
        f" {sum(1 for turn in before if turn['hit_tokens'])} hits wrong before, 0 after;"
        f" hit rate claimed {rates[0]:.1%}, now {rates[1]:.1%}"
    )
    for old, new in zip(before, after, strict=True):
        # where the hit was right it stays, where it was wrong it becomes at most two blocks less
        if not wrong([old], block_size):
            assert new == old
        assert old["hit_tokens"] - new["hit_tokens"] <= 2 * block_size


def test_without_mtp_nothing_changes(model: Path, patched: Path) -> None:
    before, after = (sweep(model, 1600, 0, first) for first in ([], [patched]))
    assert before == after
    assert wrong(after, 1600) == []
