"""Every mistake of an inventory, found at once and named with its value and what is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_turing import validate, validate_sources
from vllm_turing.validate import HostAnswer, Problem, quote

OPTIONS: dict[str, dict[str, Any]] = {
    "nvidia_driver_version": {"type": "str", "required": True},
    "nvidia_driver_reboot": {"type": "str", "choices": ["auto", "ask", "never"]},
    "vllm_service_port": {"type": "int"},
    "vllm_host_prefix": {"type": "path"},
    "preflight_accept": {"type": "list", "elements": "str"},
    "gpu_power_devices": {"type": "dict"},
    "hf_model_token": {"type": "str", "no_log": True},
    "vllm_host_manage_user": {"type": "bool"},
}
ROLES = {
    "nvidia_driver": ["nvidia_driver_version", "nvidia_driver_reboot"],
    "vllm_service": ["vllm_service_port", "vllm_service_name"],
    "vllm_host": ["vllm_host_prefix"],
}


def texts(problems: list[Problem]) -> list[str]:
    return [str(problem) for problem in problems]


# -- names -------------------------------------------------------------------------------------


def test_unknown_name_gets_the_nearest_real_one() -> None:
    found = validate.check_names({"nvidia_driver_verion": 1, "unrelated": 1}, ROLES)
    assert texts(found) == [
        "nvidia_driver_verion: no role has this variable; did you mean 'nvidia_driver_version'?"
    ]


def test_typing_error_in_the_prefix_is_found_too() -> None:
    found = validate.check_names({"nvidia_drvier_version": 1}, ROLES)
    assert "did you mean 'nvidia_driver_version'?" in str(found[0])


def test_name_without_a_near_one_points_to_the_page() -> None:
    found = validate.check_names({"vllm_host_zzzzzzzzzzzzzzzzzzzzzzzzzzzzzz": 1}, ROLES)
    assert "docs/roles/vllm_host.md" in str(found[0])


@pytest.mark.parametrize(
    "name", ["__nvidia_driver_x", "vllm_runtime_release", "preflight_report", "ansible_user", "foo"]
)
def test_private_handed_on_and_foreign_names_are_left_alone(name: str) -> None:
    assert validate.check_names({name: 1}, {**ROLES, "vllm_runtime": [], "preflight": []}) == []


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("nvidia_driver_version", 580.1, "'580.1' must be a text; write it in quotes"),
        ("nvidia_driver_version", ["580"], "must be of type str"),
        ("nvidia_driver_version", None, "is empty"),
        ("nvidia_driver_reboot", "maybe", "'maybe' is not accepted; use 'auto', 'ask' or 'never'"),
        ("vllm_service_port", "eighty", "'eighty' must be a number of type int"),
        ("vllm_service_port", True, "must be a number"),
        ("vllm_service_port", "80.5", "must be a whole number"),
        ("preflight_accept", "nvlink_links", "'nvlink_links' must be of type list"),
        ("preflight_accept", [["a"]], "item 1 ('['a']') must be of type str"),
        ("gpu_power_devices", [1], "must be of type dict"),
        ("vllm_host_manage_user", "maybe", "'maybe' must be true or false"),
    ],
)
def test_wrong_value(name: str, value: Any, words: str) -> None:
    values = {"nvidia_driver_version": "580.159.03", name: value}
    found = texts(validate.check_values(OPTIONS, values))
    assert len(found) == 1
    assert found[0].startswith(f"{name}: ")
    assert words in found[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("vllm_service_port", "8000"), ("vllm_host_manage_user", "yes"), ("preflight_accept", [])],
)
def test_values_of_the_command_line_are_texts(name: str, value: Any) -> None:
    values = {"nvidia_driver_version": "580.159.03", name: value}
    assert validate.check_values(OPTIONS, values) == []


def test_missing_value() -> None:
    assert texts(validate.check_values(OPTIONS, {})) == [
        "nvidia_driver_version: is required and has no value; give one (type str)"
    ]


def test_secret_is_not_shown() -> None:
    found = validate.check_values(
        OPTIONS, {"nvidia_driver_version": "1", "hf_model_token": ["hf_abc"]}
    )
    assert "hf_abc" not in str(found[0])


def test_keys_of_a_mapping() -> None:
    options = {"x_y": {"type": "dict", "options": {"url": {"type": "str", "required": True},
                                                   "kind": {"choices": ["a", "b"]}}}}  # fmt: skip
    for value, words in (
        ({"ur": 1}, "unknown key 'ur', did you mean 'url'?"),
        ({}, "lacks the key 'url'"),
        ({"url": "u", "kind": "c"}, "key 'kind' ('c') is not accepted; use 'a' or 'b'"),
    ):
        assert words in str(validate.check_values(options, {"x_y": value})[0])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/opt/my dir", "'/opt/my dir' has a blank; blanks are not supported in this path"),
        ("opt", "must be an absolute path"),
        ("/opt", ""),
    ],
)
def test_paths(value: str, words: str) -> None:
    found = texts(validate.check_paths(OPTIONS, {"vllm_host_prefix": value}, {"vllm_host_prefix"}))
    assert (words in found[0]) if words else not found
    assert validate.check_paths(OPTIONS, {"vllm_host_prefix": value}, set()) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("hf-mirror.com", "for example 'https://hf-mirror.com'"),
        ("https://hf-mirror.com/", ""),
        ("", ""),
        ("file:///srv/mirror", ""),
        ("https://me:word@mirror.example", "has a password in the address"),
        ("http://[bad", "is no address"),
    ],
)
def test_mirrors(value: str, words: str) -> None:
    found = texts(validate.check_urls({"vllm_host_mirror_hub": value}))
    assert (words in found[0] and "word@" not in found[0]) if words else not found


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"vllm_service_port": 70000}, "'70000' is no port; use 1 to 65535"),
        ({"nvidia_driver_version": "latest"}, "write it like '580.159.03'"),
        ({"cuda_toolkit_version": "12"}, "write it like '12.9'"),
        ({"gpu_power_limit_watts": 0}, "'0' must be 1 or more"),
        ({"nvidia_driver_resume": True, "nvidia_driver_reboot": "never"}, "contradicts"),
        (
            {"vllm_service_args": {"tensor-parallel-size": 2, "device-ids": "0"}},
            "tensor-parallel-size '2' does not match device-ids '0' (1 cards)",
        ),
        (
            {"vllm_service_args": {"tensor-parallel-size": 2, "device-ids": "1,1"}},
            "names a card twice",
        ),
        ({"vllm_service_args": {"gpu-memory-utilization": 92}}, "must be a share"),
        ({"vllm_service_args_custom": {"port": 9000}}, "sets 'port'; use vllm_service_port"),
        ({"vllm_service_args_custom": {"--host": "::"}}, "use vllm_service_host"),
    ],
)
def test_contradictions(values: dict[str, Any], words: str) -> None:
    found = texts(validate.check_rules(values))
    assert len(found) == 1
    assert words in found[0]


def test_custom_flags_are_merged_over_and_null_removes() -> None:
    values = {
        "vllm_service_args": {"tensor-parallel-size": 2, "device-ids": "0,1"},
        "vllm_service_args_custom": {"tensor_parallel_size": None, "device-ids": None},
    }
    assert validate.check_rules(values) == []


def test_unknown_stack_lists_the_known_ones() -> None:
    names = validate_sources.stack_names()
    found = str(validate.check_stack({"vllm_runtime_stack": "vllm-1"}, names)[0])
    assert "'vllm-1' is no stack; use 'vllm-0.24.0-cpu', 'vllm-0.24.0-cu129' or" in found


def test_unknown_check() -> None:
    values = {"preflight_accept": ["nvlink_link", "hardware"], "preflight_only": ["hardware"]}
    found = texts(validate.check_checks(values, ["nvlink_links"], ["hardware"]))
    assert len(found) == 2
    assert "did you mean 'nvlink_links'?" in found[0]


# -- the host's answer -------------------------------------------------------------------------

GOOD = (
    "uid=0\nmachine=x86_64\npython=/usr/bin/python3\npython_version=3.12.3\n"
    'PRETTY_NAME="Ubuntu 24.04.4 LTS"\nVERSION_ID="24.04"\nID=ubuntu\n'
)


def test_good_host() -> None:
    assert validate.check_host(validate.parse_probe(GOOD)) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("uid=0", "uid=1000", "set ansible_become: true"),
        ("python=/usr/bin/python3\npython_version=3.12.3\n", "", "apt-get install -y python3"),
        ("3.12.3", "3.8.10", "3.11 or newer is needed"),
        ("x86_64", "aarch64", "supported: Ubuntu 24.04 x86_64"),
        ("ID=ubuntu", "ID=debian", "supported: Ubuntu 24.04 x86_64"),
        ('"24.04"', '"22.04"', "'Ubuntu 24.04.4 LTS x86_64'; supported: Ubuntu 24.04 x86_64"),
    ],
)
def test_bad_host(old: str, new: str, words: str) -> None:
    found = texts(validate.check_host(validate.parse_probe(GOOD.replace(old, new))))
    assert len(found) == 1
    assert words in found[0]


def test_all_faults_of_a_host_are_told() -> None:
    text = "uid=1000\nmachine=aarch64\nID=debian\n"
    assert len(validate.check_host(validate.parse_probe(text))) == 3


def test_silent_host() -> None:
    assert "nothing readable" in str(validate.check_host(validate.parse_probe("\n"))[0])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Task failed: Missing sudo password", "again with -K"),
        ("sudo: a password is required", "again with -K"),
        ("Incorrect sudo password", "with the right one"),
        ("admin is not in the sudoers file.", "may not use sudo"),
        ("/bin/sh: 1: sudo: not found", "sudo is missing"),
        ("Timeout (32s) waiting for privilege escalation prompt", "did not answer in time"),
        ("something else", "something else"),
    ],
)
def test_failed_first_contact(message: str, words: str) -> None:
    assert words in str(validate.explain_failed_probe(message))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_no_answer_breaks_the_probe(text: str) -> None:
    answer = validate.parse_probe(text)
    if answer != HostAnswer():
        validate.check_host(answer)
    validate.explain_failed_probe(text)


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
                    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=5), c,
                                                                        max_size=3)))  # fmt: skip
@example(float("nan"))
@example(float("inf"))
@example("inf")
def test_no_value_breaks_a_check(value: Any) -> None:
    values = dict.fromkeys(
        [*OPTIONS, "vllm_service_args", "vllm_service_args_custom", "vllm_host_mirror_hub",
         "cuda_toolkit_version", "gpu_power_limit_watts", "vllm_runtime_stack"], value
    )  # fmt: skip
    validate.check_values(OPTIONS, values)
    validate.check_paths(OPTIONS, values, values)
    validate.check_urls(values)
    validate.check_rules(values)
    validate.check_stack(values, ["a"])
    validate.check_checks(values, ["a"], ["b"])


# -- the sources -------------------------------------------------------------------------------


def template(value: Any) -> Any:
    if isinstance(value, str) and "{{" in value:
        raise validate_sources.TemplateError("'x' is undefined")
    return value


def test_broken_template_of_the_inventory_is_a_problem_and_of_a_default_is_not() -> None:
    roles = {"r": validate_sources.Role({"r_a": {}, "r_b": {}}, {"r_a": "{{ fact }}"})}
    values, problems = validate_sources.effective(roles, {"r_b": "{{ x }}"}, template)
    assert values == {}
    assert texts(problems) == ["r_b: '{{ x }}' cannot be evaluated: 'x' is undefined"]


def test_report_names_each_mistake_once() -> None:
    text = validate.report([Problem("a", "x"), Problem("a", "x"), Problem("", "y")], "box")
    assert text.splitlines() == [
        "2 mistakes for host 'box'; nothing was changed:",
        "  - a: x",
        "  - y",
    ]


def test_long_values_are_cut() -> None:
    assert len(quote("x" * 500)) < 130
