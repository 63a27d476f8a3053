"""The client's figures on a server whose time is known."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from stand_in import Clock, Script, serving

from vllm_turing.benchmark_client import (
    BenchmarkError,
    Measurement,
    Server,
    count_tokens,
    counters,
    measure,
    parse_counters,
)

USAGE = {"prompt_tokens": 2000, "completion_tokens": 20}


def words(count: int, key: str = "content", text: str = "word ") -> list[dict[str, Any]]:
    return [{key: text} for _ in range(count)]


def run(script: Script, key: str | None = None) -> Measurement:
    clock = Clock()
    with serving(script, clock) as url:
        return measure(Server(url, "qwen-local", key, timeout=20), "hello", 20, clock)


def test_times_and_rates() -> None:
    script = Script(words(20), first=4.0, interval=0.05, usage=USAGE)
    got = run(script)
    assert got.error is None and got.warning is None
    assert got.ttft_s == pytest.approx(4.0)
    assert got.prefill_tok_s == pytest.approx(500)
    assert got.decode_tok_s == pytest.approx(20 / (19 * 0.05))
    assert got.finish_reason == "length"
    assert got.client_ms_per_event is not None and got.client_ms_per_event >= 0


@pytest.mark.parametrize("cut", [1, 7, 64])
def test_events_split_anywhere_even_inside_a_character(cut: int) -> None:
    script = Script(words(20, text="龍ß "), interval=0.05, usage=USAGE, cut=cut)
    got = run(script)
    assert got.error is None
    assert got.ttft_s == pytest.approx(1.0)
    assert got.decode_tok_s == pytest.approx(20 / (19 * 0.05))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "content"])
def test_reasoning_counts_and_an_empty_delta_does_not(key: str) -> None:
    script = Script([{"role": "assistant", "content": ""}, *words(20, key)], usage=USAGE)
    script.first, script.interval = 3.0, 0.5
    got = run(script)
    assert got.ttft_s == pytest.approx(3.5)


def test_a_stall_after_the_last_token_is_not_decoding() -> None:
    got = run(Script(words(20), interval=0.05, usage=USAGE, stall_at_end=30.0))
    assert got.decode_tok_s == pytest.approx(20 / (19 * 0.05))
    assert got.total_s == pytest.approx(1.0 + 19 * 0.05 + 30.0)


def test_tokens_that_come_all_at_once_have_no_rate() -> None:
    got = run(Script(words(20), first=9.0, interval=0.0001, usage=USAGE, lockstep=False))
    assert got.decode_tok_s is None
    assert got.warning is not None and "does not stream" in got.warning


def test_no_usage_means_no_rate() -> None:
    got = run(Script(words(5)))
    assert (got.prompt_tokens, got.prefill_tok_s, got.decode_tok_s) == (None, None, None)
    assert got.ttft_s == pytest.approx(1.0)


def metrics(accepted: int, drafted: int, hits: int) -> str:
    return (
        "# TYPE vllm:spec_decode_num_accepted_tokens counter\n"
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0\n'
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}.0\n'
        f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}.0\n'
    )


def test_acceptance_and_cache_hits_are_differences_of_counters() -> None:
    script = Script(words(20), usage=USAGE)
    script.metrics = [metrics(1000, 2000, 64), metrics(1060, 2080, 1664)]
    got = run(script)
    assert got.acceptance == pytest.approx(0.75)
    assert got.cached_tokens == 1600


def test_a_model_without_drafts_has_no_acceptance() -> None:
    script = Script(words(20), usage=USAGE)
    script.metrics = ["vllm:prefix_cache_hits_total 0.0\n"]
    got = run(script)
    assert got.acceptance is None
    assert got.cached_tokens == 0


def test_a_server_without_counters_leaves_them_unknown() -> None:
    got = run(Script(words(20), usage=USAGE))
    assert got.acceptance is None and got.cached_tokens is None


def test_a_restarted_server_gives_no_negative_figure() -> None:
    script = Script(words(20), usage=USAGE)
    script.metrics = [metrics(1000, 2000, 64), metrics(3, 9, 0)]
    got = run(script)
    assert got.acceptance is None and got.cached_tokens is None


def test_counters_are_summed_over_labels() -> None:
    text = (
        'vllm:prefix_cache_hits_total{engine="0"} 3.0\n'
        'vllm:prefix_cache_hits_total{engine="1"} 4.5e1\n'
        'vllm:prefix_cache_hits_created{engine="1"} 1.7e9\n'
        "garbage\nvllm:prefix_cache_queries_total nonsense\n"
    )
    assert parse_counters(text) == {"vllm:prefix_cache_hits": 48.0}


def test_the_key_is_sent_as_a_header_and_nowhere_else() -> None:
    script = Script(words(2), usage=USAGE)
    run(script, key="s3cret")
    posts = [request for request in script.seen if request["path"].endswith("completions")]
    assert posts[0]["headers"]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(posts[0]["body"]) + posts[0]["path"]


def test_a_broken_stream_keeps_what_was_seen() -> None:
    got = run(Script(words(20), interval=0.05, usage=USAGE, break_after=7))
    assert got.error is not None and "7 events" in got.error
    assert got.ttft_s == pytest.approx(1.0)
    assert got.decode_tok_s is None


def test_an_error_inside_the_stream_is_told() -> None:
    script = Script(words(3), raw_event=b'data: {"error": {"message": "out of memory"}}\n\n')
    got = run(script)
    assert got.error is not None and "out of memory" in got.error


def test_something_else_than_json_is_told() -> None:
    got = run(Script(words(3), raw_event=b"data: <html>\n\n"))
    assert got.error is not None and "not JSON" in got.error


@pytest.mark.parametrize(
    ("status", "refusal", "words_of_it"),
    [
        (401, {"error": "Unauthorized"}, ["refuses the key", "401"]),
        (429, {"error": {"message": "too many"}}, ["busy", "429", "too many"]),
        (404, {"error": {"message": "no such model"}}, ["'qwen-local'", "no such model"]),
        (400, {"error": {"message": "maximum context length is 100"}}, ["400", "context length"]),
        (502, "<html>\n bad gateway</html>", ["502", "bad gateway"]),
    ],
)
def test_a_refusal_is_one_sentence(status: int, refusal: Any, words_of_it: list[str]) -> None:
    with pytest.raises(BenchmarkError) as caught:
        run(Script(status=status, refusal=refusal))
    text = str(caught.value)
    assert "\n" not in text
    for part in words_of_it:
        assert part in text


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BenchmarkError, match="is the service running"):
            measure(Server(url, "qwen-local"), "hello", 1)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(BenchmarkError, match="must look like"):
        counters(Server(url, "qwen-local"))


def test_tokens_are_counted_by_the_server() -> None:
    with serving(Script(tokens_a_word=2.0, max_model_len=4096), Clock()) as url:
        assert count_tokens(Server(url, "qwen-local"), "one two three") == (16, 4096)
