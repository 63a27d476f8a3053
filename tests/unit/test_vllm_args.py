import json

import pytest
import yaml

from vllm_turing import vllm_args


def as_vllm_reads(text: str) -> list[str]:
    """The rules of load_config_file in vLLM 0.24.0, applied to what PyYAML makes of the text."""
    argv: list[str] = []
    for key, value in (yaml.safe_load(text) or {}).items():
        if isinstance(value, bool):
            if value:
                argv.append(f"--{key}")
        elif isinstance(value, list):
            if value:
                argv += [f"--{key}", *(str(item) for item in value)]
        elif isinstance(value, dict):
            argv += [f"--{key}", json.dumps(value)]
        else:
            argv += [f"--{key}", str(value)]
    return argv


HARD = {
    "model": '/srv/my models/it\'s "it" \\ 100% $HOME #1: yes',
    "served-model-name": ["one", "two: 2"],
    "dtype": "half",
    "port": 8000,
    "gpu-memory-utilization": 0.92,
    "seed": "0x10",
    "device-ids": "0,1",
    "enable-prefix-caching": True,
    "async-scheduling": False,
    "no-enable-chunked-prefill": False,
    "speculative-config": {"method": "mtp", "num_speculative_tokens": 3},
    "override-generation-config": {
        "min_p": 0.0,
        "x": 1e-05,
        "big": 1e22,
        "stop": ["null", "~", ""],
    },
    "additional-config": {},
    "compilation-config": {"a": {"b": {"c": [1, {"d": None}]}}, "yes": "no", "1": "1_000"},
    "chat-template": "line one\nline two\ttab \u2028 sep \x85 next \U0001f600 ü",
}


def test_the_file_reads_back_as_the_argv_that_is_shown() -> None:
    assert as_vllm_reads(vllm_args.to_yaml(HARD)) == vllm_args.to_argv(HARD)


def test_values_survive_exactly() -> None:
    data = yaml.safe_load(vllm_args.to_yaml(HARD))
    assert data["model"] == HARD["model"]
    assert data["chat-template"] == HARD["chat-template"]
    assert data["override-generation-config"] == HARD["override-generation-config"]
    assert data["compilation-config"] == HARD["compilation-config"]
    assert data["seed"] == "0x10"


def test_false_takes_the_no_form_where_there_is_one() -> None:
    assert vllm_args.to_argv({"async_scheduling": False, "no-enable-lora": False}) == [
        "--no-async-scheduling",
        "--enable-lora",
    ]
    assert vllm_args.to_argv({"headless": False, "x": None, "middleware": []}) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"--dtype": "half"}, ["'--dtype'", "dashes"]),
        ({"api-key": "abc"}, ["'api-key'", "vllm_service_api_key_enabled"]),
        ({"a": True, "no-a": True}, ["'a'", "'no-a'"]),
        ({"max-len": 1, "max_len": 2}, ["'max-len'", "twice"]),
        ({"x": [[1]]}, ["'x'", "[[1]]"]),
        ({"x": float("nan")}, ["'x'", "nan"]),
        ({"x": {"y": {1, 2}}}, ["'x'", "set"]),
    ],
)
def test_what_the_file_cannot_carry_is_refused(args: dict, words: list[str]) -> None:
    with pytest.raises(vllm_args.ArgsError) as error:
        vllm_args.to_yaml(args)
    for word in words:
        assert word in str(error.value)
    assert "abc" not in str(error.value)


def test_custom_flags_replace_remove_and_turn_round() -> None:
    base = {"async-scheduling": False, "dtype": "half", "speculative-config": {"a": 1, "b": 2}}
    custom = {"no_async_scheduling": None, "dtype": None, "speculative-config": {"a": 3}}
    assert vllm_args.merge(base, custom) == {"speculative-config": {"a": 3}}
    assert vllm_args.merge({"enable-x": True}, {"no-enable-x": True}) == {"no-enable-x": True}


def test_command_lines_are_compared_by_meaning() -> None:
    one = ["--a", '{"x": 1, "y": [1,2]}', "--flag", "--n=3", "--list", "p", "q"]
    other = ["--list", "p", "q", "--n", "3", "--flag", "--a", '{"y":[1, 2],"x":1}']
    assert vllm_args.same_argv(one, other)
    assert not vllm_args.same_argv(one, [*other, "--extra"])
    assert not vllm_args.same_argv(["--a", "{'x': 1}"], ["--a", '{"x": 1}'])
    assert not vllm_args.same_argv(["--list", "p", "q"], ["--list", "q", "p"])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max-model-length", "max-model-len"),
        ("enable-prefix-cache", "enable-prefix-caching"),
        ("utilization-gpu-memory", "gpu-memory-utilization"),
        ("zzzz", None),
    ],
)
def test_an_unknown_flag_is_answered_with_the_nearest(wrong: str, right: str | None) -> None:
    known = ["max-model-len", "max-num-seqs", "enable-prefix-caching", "gpu-memory-utilization"]
    assert vllm_args.nearest(wrong, known) == right
