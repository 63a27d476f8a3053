"""Means, comparison and page; the reference host's own rows are the test data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_turing.benchmark_report import (
    comparison,
    failures,
    markdown,
    means_table,
    misses,
    progress,
    summary,
)

ROOT = Path(__file__).parents[3]


def row(label: str, *figures: float, **more: Any) -> dict[str, Any]:
    names = ("prompt_tokens", "ttft_s", "prefill_tok_s", "decode_tok_s", "acceptance")
    return {"label": label, "cached_tokens": 0, **dict(zip(names, figures, strict=True)), **more}


FP8 = [
    row("20K", 17042, 13.090, 1301.9, 88.0, 0.789),
    row("20K", 17052, 13.138, 1297.9, 77.6, 0.683),
    row("20K", 17041, 13.182, 1292.7, 87.8, 0.789),
    row("60K", 50983, 45.587, 1118.4, 87.1, 0.636),
    row("60K", 51109, 46.039, 1110.1, 105.6, 0.761),
]


def reference() -> dict[str, dict[str, float]]:
    defaults = yaml.safe_load((ROOT / "roles/vllm_benchmark/defaults/main.yml").read_text())
    result: dict[str, dict[str, float]] = defaults["vllm_benchmark_reference"]
    return result


def test_the_reference_rows_give_the_reference_means() -> None:
    means = summary(FP8)
    for label, figures in reference().items():
        for figure, value in figures.items():
            assert means[label][figure] == pytest.approx(value, rel=1e-3), (label, figure)
    assert (means["20K"]["runs"], means["60K"]["runs"]) == (3, 2)


def test_warm_ups_partial_runs_and_cached_prompts_do_not_count() -> None:
    runs = [
        row("20K", 17042, 99.0, 1.0, 1.0, 0.1, warmup=True),
        row("20K", 17042, 99.0, 1.0, 1.0, 0.1, error="the stream broke off"),
        row("20K", 17042, 0.5, 30000.0, 1.0, 0.1) | {"cached_tokens": 16000},
        *FP8[:3],
    ]
    assert summary(runs)["20K"] == summary(FP8)["20K"]
    page = markdown({"host": "box", "runs": runs, "means": summary(runs)})
    for words in ("warm-up", "partial: the stream broke off", "16000 tokens came from"):
        assert words in page


def test_a_label_without_a_good_run_has_no_figures() -> None:
    runs = [row("20K", 17042, 99.0, 1.0, 1.0, 0.1, error="gone")]
    means = summary(runs)
    assert means["20K"]["runs"] == 0 and means["20K"]["ttft_s"] is None
    assert means_table(means)["rows"] == [["20K", "0", "n/a", "n/a", "n/a", "n/a"]]


def test_inside_and_outside_the_band() -> None:
    means = summary(FP8)
    assert misses(comparison(means, reference(), 0.1)) == []
    slow = {"20K": {**means["20K"], "decode_tok_s": 60.0}}
    told = misses(comparison(slow, {"20K": reference()["20K"]}, 0.1))
    assert told == ["20K Decode (tok/s): 60.0, -29.0% from the baseline's 84.5"]


def test_a_figure_that_was_not_measured_is_a_miss() -> None:
    told = misses(comparison({}, {"60K": {"ttft_s": 45.813}}, 0.1))
    assert told == ["60K TTFT (s): not measured, the baseline has 45.813"]


def test_the_page_has_every_run_and_every_figure() -> None:
    means = summary(FP8)
    page = markdown(
        {
            "host": "box",
            "about": {"stack": "vllm-0.24.0-cu129"},
            "runs": FP8,
            "means": means,
            "comparison": comparison(means, reference(), 0.1),
        }
    )
    assert "- stack: vllm-0.24.0-cu129" in page
    assert "| 60K | 51109 | 46.039 | 1,110.1 | 105.6 | 76.1% |" in page
    assert "| 20K Decode (tok/s) | 84.5 | 84.5 | -0.0% | yes |" in page
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


def test_a_line_for_each_run() -> None:
    assert progress(FP8[0]) == "20K: 17042 tokens, TTFT 13.090 s, decode 88.0 tok/s"
    assert progress({"label": "20K", "error": "gone"}) == "20K: gone"


def test_each_error_is_told_once_with_the_prompts_that_it_hit() -> None:
    runs = [
        {"label": "20K", "error": "no server answers."},
        {"label": "60K", "error": "no server answers."},
        {"label": "60K", "error": "no server answers."},
        FP8[0],
        {"label": "20K", "error": "the stream broke off"},
    ]
    assert failures(runs) == ["20K, 60K: no server answers", "20K: the stream broke off"]
    assert failures(FP8) == []
