"""Summaries of benchmark runs, their comparison with a baseline, and the Markdown page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

Run = Mapping[str, Any]

FIGURES = ("ttft_s", "prefill_tok_s", "decode_tok_s", "acceptance")
TITLES = {
    "ttft_s": "TTFT (s)",
    "prefill_tok_s": "Prefill (tok/s)",
    "decode_tok_s": "Decode (tok/s)",
    "acceptance": "MTP acceptance",
}
DIGITS = {"ttft_s": 3, "prefill_tok_s": 1, "decode_tok_s": 1}
NONE = "n/a"
CACHED_SHARE = 0.01
"""More of a prompt than this from the prefix cache makes its figures worthless."""


def is_measured(run: Run) -> bool:
    """Tell whether a run counts: not a warm-up, whole, and not from the cache."""
    return not run.get("warmup") and not run.get("error") and not from_cache(run)


def from_cache(run: Run) -> bool:
    """Tell whether the server took part of the prompt from its prefix cache."""
    cached, tokens = run.get("cached_tokens"), run.get("prompt_tokens")
    return bool(cached and tokens and cached > CACHED_SHARE * tokens)


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the labels of the measured prompts, in their order."""
    return list(dict.fromkeys(str(run["label"]) for run in runs if not run.get("warmup")))


def summary(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return, for each label, the mean of every figure over the runs that count.

    A figure that no run has is None.
    """
    result: dict[str, dict[str, Any]] = {}
    for label in labels(runs):
        own = [run for run in runs if run["label"] == label and is_measured(run)]
        result[label] = {"runs": len(own), "prompt_tokens": average(own, "prompt_tokens")}
        result[label].update({figure: average(own, figure) for figure in FIGURES})
    return result


def average(runs: Sequence[Run], figure: str) -> float | None:
    """Return the mean of a figure over the runs that have it."""
    values = [float(run[figure]) for run in runs if run.get(figure) is not None]
    return mean(values) if values else None


def comparison(
    means: Mapping[str, Mapping[str, Any]],
    baseline: Mapping[str, Mapping[str, float]],
    tolerance: float,
) -> list[dict[str, Any]]:
    """Compare means with a baseline; one row for each figure that the baseline has.

    `within` is None where nothing was measured: that is neither a hit nor a miss.
    """
    rows: list[dict[str, Any]] = []
    for label, expected in baseline.items():
        for figure in FIGURES:
            if figure not in expected:
                continue
            want, found = float(expected[figure]), means.get(label, {}).get(figure)
            deviation = None if found is None else found / want - 1
            rows.append(
                {
                    "label": label,
                    "figure": figure,
                    "baseline": want,
                    "found": found,
                    "deviation": deviation,
                    "within": None if deviation is None else abs(deviation) <= tolerance,
                }
            )
    return rows


def misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each figure outside its band, or not measured at all."""
    result = []
    for row in rows:
        name = f"{row['label']} {TITLES[row['figure']]}"
        want = written(row["figure"], row["baseline"])
        if row["within"] is None:
            result.append(f"{name}: not measured, the baseline has {want}")
        elif not row["within"]:
            found = written(row["figure"], row["found"])
            result.append(f"{name}: {found}, {row['deviation']:+.1%} from the baseline's {want}")
    return result


def failures(runs: Sequence[Run]) -> list[str]:
    """Return one sentence for each different error, with the prompts that it hit."""
    hit: dict[str, list[str]] = {}
    for run in runs:
        if run.get("error"):
            hit.setdefault(str(run["error"]).rstrip("."), []).append(str(run["label"]))
    return [f"{', '.join(dict.fromkeys(labels))}: {error}" for error, labels in hit.items()]


def written(figure: str, value: float | None) -> str:
    """Write a figure the way the tables do; n/a where there is none."""
    if value is None:
        return NONE
    return f"{value:.1%}" if figure == "acceptance" else f"{value:,.{DIGITS[figure]}f}"


def progress(run: Run) -> str:
    """Return one line about a run that has just ended."""
    if run.get("error"):
        return f"{run['label']}: {run['error']}"
    parts = [f"{run['label']}: {run.get('prompt_tokens')} tokens"]
    parts += [f"TTFT {written('ttft_s', run.get('ttft_s'))} s"]
    parts += [f"decode {written('decode_tok_s', run.get('decode_tok_s'))} tok/s"]
    return ", ".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table; the first column left, the others right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]


def remark(run: Run) -> str:
    """Return what must be said about a run beside its figures."""
    remarks = []
    if run.get("warmup"):
        remarks.append("warm-up")
    if run.get("error"):
        kind = "partial" if run.get("ttft_s") is not None else "failed"
        remarks.append(f"{kind}: {run['error']}")
    elif from_cache(run):
        remarks.append(f"not counted: {run['cached_tokens']} tokens came from the prefix cache")
    if run.get("warning"):
        remarks.append(str(run["warning"]))
    return "; ".join(remarks).replace("|", "\\|")


def means_table(means: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means as `columns` and `rows` of text."""
    return {
        "columns": ["Prompt", "Runs", *(TITLES[figure] for figure in FIGURES)],
        "rows": [
            [label, str(row["runs"]), *(written(figure, row[figure]) for figure in FIGURES)]
            for label, row in means.items()
        ],
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Return the page of one benchmark: runs, means, comparison."""
    runs: Sequence[Run] = result["runs"]
    lines = [f"# Benchmark of {result['host']}", ""]
    lines += [f"- {key}: {value}" for key, value in result.get("about", {}).items()]
    lines += ["", "## Runs", ""]
    header = ["Prompt", "Tokens", *(TITLES[figure] for figure in FIGURES), "Remarks"]
    lines += table(
        header,
        [
            [
                str(run["label"]),
                str(run.get("prompt_tokens") or NONE),
                *(written(figure, run.get(figure)) for figure in FIGURES),
                remark(run),
            ]
            for run in runs
        ],
    )
    means = means_table(result["means"])
    lines += ["", "## Means", "", *table(means["columns"], means["rows"])]
    if result.get("comparison"):
        lines += ["", "## Against the baseline", ""]
        lines += table(
            ["Figure", "Baseline", "Found", "Deviation", "Within"],
            [
                [
                    f"{row['label']} {TITLES[row['figure']]}",
                    written(row["figure"], row["baseline"]),
                    written(row["figure"], row["found"]),
                    NONE if row["deviation"] is None else f"{row['deviation']:+.1%}",
                    {True: "yes", False: "no", None: NONE}[row["within"]],
                ]
                for row in result["comparison"]
            ],
        )
    return "\n".join(lines) + "\n"
