"""Find every mistake in an inventory at once, before any host is touched.

Works on plain data: the options of every role's ``meta/argument_specs.yml``, the values as they
would reach the roles, and what one probe of the host printed. The action plugin
``validate_inputs`` collects these and shows the result.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

#: What the project supports; docs and messages name exactly this.
SUPPORTED = "Ubuntu 24.04 x86_64"

#: Facts that roles hand on with set_fact: they carry a role's prefix and are no settings.
HANDED_ON = frozenset({"vllm_runtime_release", "preflight_report"})

#: Options of type path that name a place on the controller, where blanks do no harm.
CONTROLLER_PATHS = frozenset({"hf_model_lock", "preflight_json", "vllm_host_render_root"})

_TRUE = frozenset({"yes", "on", "1", "true", "t", "y"})
_FALSE = frozenset({"no", "off", "0", "false", "f", "n"})

Options = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Problem:
    """One mistake.

    :ivar variable: the variable's name; empty when the mistake is not in one variable
    :ivar text: the rest of the sentence
    """

    variable: str
    text: str

    def __str__(self) -> str:
        """Return the sentence."""
        return f"{self.variable}: {self.text}" if self.variable else self.text


def quote(value: Any, secret: bool = False) -> str:
    """Return a value in quotes for a message; long ones are cut, secret ones hidden."""
    if secret:
        return "(hidden)"
    text = str(value)
    if len(text) > 120:
        text = text[:117] + "..."
    return "'" + text + "'"


def one_of(names: Iterable[Any]) -> str:
    """Return ``'a', 'b' or 'c'`` for a message."""
    quoted = [quote(name) for name in names]
    if len(quoted) < 2:
        return "".join(quoted)
    return ", ".join(quoted[:-1]) + " or " + quoted[-1]


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that looks most like the given one, or an empty string."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return matches[0] if matches else ""


# -- names -----------------------------------------------------------------------------------------


def check_names(given: Iterable[str], roles: Mapping[str, Iterable[str]]) -> list[Problem]:
    """Find variables that look like a role's but are none.

    :param given: names of all variables of the host
    :param roles: role name to the names of its public variables
    :returns: one problem per unknown name, with the nearest real one
    """
    known = {name for names in roles.values() for name in names} | HANDED_ON
    prefixes = tuple(f"{role}_" for role in roles)
    problems = []
    for name in sorted(set(given) - known):
        if name.startswith("_"):
            continue
        if name.startswith(prefixes):
            role = max((r for r in roles if name.startswith(f"{r}_")), key=len)
            close = nearest(name, known)
            hint = (
                f"did you mean {quote(close)}?"
                if close
                else f"see docs/roles/{role}.md for the variables of role {quote(role)}"
            )
            problems.append(Problem(name, f"no role has this variable; {hint}"))
        elif close := nearest(name, known, cutoff=0.92):
            problems.append(
                Problem(name, f"no role has this variable; did you mean {quote(close)}?")
            )
    return problems


# -- types and choices -----------------------------------------------------------------------------


def type_problem(spec: Mapping[str, Any], value: Any) -> str:
    """Tell what is wrong with a value's type, or return an empty string.

    Stricter than Ansible's own conversion in one way: a number is no text. ``12.10`` without
    quotes is the number 12.1, so that a version has to be written in quotes.

    :param spec: an option of an argument spec (``type``, ``elements``, ``options``)
    :param value: the value, templated
    """
    kind = str(spec.get("type", "str"))
    problem = _scalar_problem(kind, value)
    if problem is None:
        problem = f"must be of type {kind}" if _container_mismatch(kind, value) else ""
    if problem or value is None:
        return problem
    if kind == "list" and isinstance(value, list):
        element = {"type": spec.get("elements", "raw"), "options": spec.get("options")}
        for index, item in enumerate(value):
            inner = type_problem(element, item)
            if inner:
                return f"item {index + 1} ({quote(item)}) {inner}"
    if kind == "dict" and isinstance(value, Mapping) and spec.get("options"):
        return _suboption_problem(spec["options"], value)
    return ""


def _scalar_problem(kind: str, value: Any) -> str | None:
    """Check a scalar type; None when ``kind`` is no scalar type."""
    if value is None:
        return (
            "" if kind in ("raw", "json") else f"is empty; give a value of type {kind} or remove it"
        )
    if kind in ("str", "path"):
        if isinstance(value, str):
            return ""
        if isinstance(value, (bool, int, float)):
            return "must be a text; write it in quotes"
        return f"must be of type {kind}"
    if kind == "bool":
        known = isinstance(value, str) and value.strip().lower() in _TRUE | _FALSE
        return (
            "" if isinstance(value, bool) or known or value in (0, 1) else "must be true or false"
        )
    if kind in ("int", "float"):
        if isinstance(value, bool):
            return f"must be a number of type {kind}"
        try:
            number = float(value)
        except (TypeError, ValueError):
            return f"must be a number of type {kind}"
        if not math.isfinite(number):
            return f"must be a number of type {kind}"
        return "must be a whole number" if kind == "int" and number != int(number) else ""
    if kind in ("raw", "json", "jsonarg", "bytes", "bits"):
        return ""
    return None


def _container_mismatch(kind: str, value: Any) -> bool:
    return (kind == "list" and not isinstance(value, list)) or (
        kind == "dict" and not isinstance(value, Mapping)
    )


def _suboption_problem(options: Options, value: Mapping[str, Any]) -> str:
    """Check a mapping against the options of its keys."""
    for key in value:
        if key not in options:
            close = nearest(str(key), options)
            hint = f", did you mean {quote(close)}?" if close else f"; accepted: {one_of(options)}"
            return f"has an unknown key {quote(key)}{hint}"
    for key, option in options.items():
        if key not in value:
            if option.get("required"):
                return f"lacks the key {quote(key)}"
            continue
        inner = type_problem(option, value[key]) or choice_problem(option, value[key])
        if inner:
            return f"key {quote(key)} ({quote(value[key])}) {inner}"
    return ""


def choice_problem(spec: Mapping[str, Any], value: Any) -> str:
    """Tell which values are accepted when this one is not, or return an empty string."""
    choices = spec.get("choices")
    if not choices:
        return ""
    names = list(choices)
    accepted = {str(name) for name in names}
    wrong = [
        item
        for item in (value if isinstance(value, list) else [value])
        if str(item) not in accepted
    ]
    return f"is not accepted; use {one_of(names)}" if wrong else ""


def check_values(options: Options, values: Mapping[str, Any]) -> list[Problem]:
    """Check the values of one role's options.

    :param options: the role's public options
    :param values: effective values; a name that is absent has neither a value nor a default
    """
    problems = []
    for name, spec in options.items():
        if name not in values:
            if spec.get("required"):
                wanted = (
                    one_of(spec["choices"])
                    if spec.get("choices")
                    else f"type {spec.get('type', 'str')}"
                )
                problems.append(Problem(name, f"is required and has no value; give one ({wanted})"))
            continue
        value = values[name]
        text = type_problem(spec, value) or choice_problem(spec, value)
        if text:
            secret = bool(spec.get("no_log"))
            problems.append(Problem(name, f"{quote(value, secret)} {text}"))
    return problems


# -- paths and addresses ---------------------------------------------------------------------------


def check_paths(
    options: Options, values: Mapping[str, Any], given: Container[str]
) -> list[Problem]:
    """Check paths on the host: absolute, and without blanks.

    Blanks would have to survive shebang lines, ``LD_LIBRARY_PATH`` and nvcc's command lines; the
    first two cannot quote them, so they are refused here instead of failing half-way.

    :param given: names of the host's own variables; a path derived from another one is not
        reported a second time
    """
    problems = []
    for name, spec in options.items():
        value = values.get(name)
        if spec.get("type") != "path" or name in CONTROLLER_PATHS or name not in given:
            continue
        if not isinstance(value, str):
            continue
        if re.search(r"\s", value):
            problems.append(
                Problem(name, f"{quote(value)} has a blank; blanks are not supported in this path")
            )
        elif value and not value.startswith("/"):
            problems.append(
                Problem(name, f"{quote(value)} must be an absolute path (begin with '/')")
            )
    return problems


def check_urls(values: Mapping[str, Any]) -> list[Problem]:
    """Check every ``*_mirror_*`` variable: empty, or an address with a scheme and a host."""
    problems = []
    for name, value in values.items():
        if "_mirror_" not in name or not isinstance(value, str) or not value:
            continue
        try:
            parts = urlsplit(value)
            good = parts.scheme in ("http", "https", "file") and bool(parts.netloc or parts.path)
            secret = parts.password is not None
        except ValueError:
            good, secret = False, False
        if not good or re.search(r"\s", value):
            problems.append(
                Problem(
                    name,
                    f"{quote(value)} is no address; write it with its scheme, for example "
                    f"{quote('https://' + value.split('://')[-1].strip())}",
                )
            )
        elif secret:
            problems.append(
                Problem(name, "has a password in the address; use ~/.netrc on the host instead")
            )
    return problems


# -- values that contradict each other ------------------------------------------------------


def check_rules(values: Mapping[str, Any]) -> list[Problem]:
    """Check what a single option cannot say: ranges, and values that exclude each other."""
    problems: list[Problem] = []
    for rule in _RULES:
        problems += rule(values)
    return problems


def service_args(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's flags as the service gets them: the defaults with the custom ones merged over.

    Keys come without leading dashes and with ``-`` for ``_``; a null value removes a flag.
    """
    merged: dict[str, Any] = {}
    for name in ("vllm_service_args", "vllm_service_args_custom"):
        flags = values.get(name)
        if isinstance(flags, Mapping):
            merged.update({str(k).lstrip("-").replace("_", "-"): v for k, v in flags.items()})
    return {flag: value for flag, value in merged.items() if value is not None}


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _rule_port(values: Mapping[str, Any]) -> list[Problem]:
    port = values.get("vllm_service_port")
    number = _integer(port)
    if number is None or 1 <= number <= 65535:
        return []
    return [Problem("vllm_service_port", f"{quote(port)} is no port; use 1 to 65535")]


def _rule_positive(values: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for name in ("vllm_service_ready_timeout", "vllm_runtime_keep", "gpu_power_limit_watts"):
        number = _integer(values.get(name))
        if number is not None and number < 1:
            problems.append(Problem(name, f"{quote(values[name])} must be 1 or more"))
    return problems


def _rule_version(values: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for name, pattern, example in (
        ("nvidia_driver_version", r"\d{3}(\.\d+){0,2}", "580.159.03"),
        ("cuda_toolkit_version", r"\d+\.\d+", "12.9"),
    ):
        value = values.get(name)
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            problems.append(
                Problem(name, f"{quote(value)} is no version; write it like {quote(example)}")
            )
    return problems


def _rule_reboot(values: Mapping[str, Any]) -> list[Problem]:
    if values.get("nvidia_driver_resume") is True and values.get("nvidia_driver_reboot") == "never":
        return [
            Problem(
                "nvidia_driver_resume",
                "'True' contradicts nvidia_driver_reboot 'never': there is no boot to go on after; "
                "set nvidia_driver_reboot to 'auto' or 'ask', or nvidia_driver_resume to false",
            )
        ]
    return []


def _rule_cards(values: Mapping[str, Any]) -> list[Problem]:
    flags = service_args(values)
    ids = str(flags.get("device-ids", "")).strip()
    size = _integer(flags.get("tensor-parallel-size", 1))
    pipeline = _integer(flags.get("pipeline-parallel-size", 1)) or 1
    if not ids or size is None:
        return []
    chosen = [part.strip() for part in ids.split(",") if part.strip()]
    problems = []
    if len(chosen) != len(set(chosen)):
        problems.append(Problem("vllm_service_args", f"device-ids {quote(ids)} names a card twice"))
    elif size * pipeline != len(chosen):
        problems.append(
            Problem(
                "vllm_service_args",
                f"tensor-parallel-size {quote(size)} does not match device-ids {quote(ids)} "
                f"({len(chosen)} cards); make them equal",
            )
        )
    return problems


def _rule_flags(values: Mapping[str, Any]) -> list[Problem]:
    """Refuse a second way to set what has a variable of its own."""
    owned = {
        "host": "vllm_service_host",
        "port": "vllm_service_port",
        "api-key": "vllm_service_api_key_enabled",
    }
    custom = values.get("vllm_service_args_custom")
    if not isinstance(custom, Mapping):
        return []
    flags = {str(key).lstrip("-").replace("_", "-"): value for key, value in custom.items()}
    return [
        Problem("vllm_service_args_custom", f"sets {quote(flag)}; use {variable} for that")
        for flag, variable in owned.items()
        if flags.get(flag) is not None
    ]


def _rule_utilization(values: Mapping[str, Any]) -> list[Problem]:
    value = service_args(values).get("gpu-memory-utilization")
    try:
        share = float(value) if value is not None else 0.5
    except (TypeError, ValueError):
        share = -1.0
    if 0 < share <= 1:
        return []
    return [
        Problem(
            "vllm_service_args",
            f"gpu-memory-utilization {quote(value)} must be a share above 0, at most 1",
        )
    ]


_RULES: Sequence[Callable[[Mapping[str, Any]], list[Problem]]] = (
    _rule_port,
    _rule_positive,
    _rule_version,
    _rule_reboot,
    _rule_cards,
    _rule_flags,
    _rule_utilization,
)


def check_stack(values: Mapping[str, Any], stacks: Sequence[str]) -> list[Problem]:
    """Check the stack's name against the folders of ``stacks/``."""
    name = values.get("vllm_runtime_stack")
    if name is None or str(name) in stacks:
        return []
    return [Problem("vllm_runtime_stack", f"{quote(name)} is no stack; use {one_of(stacks)}")]


def check_checks(
    values: Mapping[str, Any], checks: Sequence[str], groups: Sequence[str]
) -> list[Problem]:
    """Check the names of preflight checks in the variables that hold such names.

    :param checks: ids of all checks
    :param groups: their groups; only ``preflight_accept`` takes none
    """
    problems = []
    for variable in ("preflight_accept", "preflight_only", "preflight_skip"):
        names = values.get(variable)
        known = [*checks] if variable == "preflight_accept" else [*checks, *groups]
        for name in names if isinstance(names, list) else []:
            if str(name) not in known:
                close = nearest(str(name), known, cutoff=0.5)
                hint = f"did you mean {quote(close)}?" if close else "docs/preflight.md lists them"
                problems.append(Problem(variable, f"{quote(name)} is no check; {hint}"))
    return problems


# -- the host's own answer --------------------------------------------------------------------


@dataclass(frozen=True)
class HostAnswer:
    """What the probe of a host printed.

    :ivar uid: the user id that the tasks run with; -1 when unknown
    :ivar python: path of python3; empty when there is none
    :ivar system: ID of /etc/os-release
    :ivar release: VERSION_ID of /etc/os-release
    :ivar pretty: PRETTY_NAME of /etc/os-release
    :ivar machine: what ``uname -m`` says
    """

    uid: int = -1
    python: str = ""
    python_version: str = ""
    system: str = ""
    release: str = ""
    pretty: str = ""
    machine: str = ""


def parse_probe(text: str) -> HostAnswer:
    """Read the ``key=value`` lines of the probe; unknown lines are passed over."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and re.fullmatch(r"[A-Za-z_]+", key):
            found.setdefault(key, value.strip().strip("\"'"))
    uid = found.get("uid", "")
    return HostAnswer(
        uid=int(uid) if uid.isascii() and uid.isdigit() else -1,
        python=found.get("python", ""),
        python_version=found.get("python_version", ""),
        system=found.get("ID", ""),
        release=found.get("VERSION_ID", ""),
        pretty=found.get("PRETTY_NAME", ""),
        machine=found.get("machine", ""),
    )


def check_host(answer: HostAnswer) -> list[Problem]:
    """Check that the host is one that the roles can work on."""
    problems = []
    if not answer.machine and not answer.system:
        return [
            Problem(
                "",
                "the host answered the first probe with nothing readable; log in by hand and look",
            )
        ]
    if answer.uid != 0:
        problems.append(
            Problem(
                "ansible_become",
                "the tasks would not run as root on this host; set ansible_become: true in the "
                "inventory, and add -K when sudo asks for a password",
            )
        )
    if not answer.python:
        problems.append(
            Problem(
                "", "python3 is missing on this host; install it there: apt-get install -y python3"
            )
        )
    elif not _python_new_enough(answer.python_version):
        problems.append(
            Problem(
                "",
                f"{answer.python} on this host is Python {quote(answer.python_version)}; "
                "3.11 or newer is needed",
            )
        )
    if (answer.system, answer.release, answer.machine) != ("ubuntu", "24.04", "x86_64"):
        found = f"{answer.pretty or answer.system} {answer.machine}".strip()
        problems.append(Problem("", f"this host is {quote(found)}; supported: {SUPPORTED}"))
    return problems


def _python_new_enough(version: str) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match.group(1)), int(match.group(2))) >= (3, 11)


def explain_failed_probe(message: str) -> Problem:
    """Turn Ansible's own words for a failed first contact into one sentence.

    :param message: the message of the failed task
    """
    low = message.lower()
    if "missing sudo password" in low or "a password is required" in low:
        text = "sudo asks for a password on this host; run the same command again with -K"
    elif (
        "not in the sudoers" in low or "may not run sudo" in low or "not allowed to execute" in low
    ):
        text = (
            "the user of this connection may not use sudo on this host; log in as another user "
            "(ansible_user), or add this one to the group sudo"
        )
    elif "incorrect sudo password" in low or "try again" in low:
        text = (
            "sudo refused the password given with -K; run the same command again with the right one"
        )
    elif "sudo: not found" in low or "sudo: command not found" in low or "no such file" in low:
        text = "sudo is missing on this host; install it, or connect as root (ansible_user: root)"
    elif "timeout" in low or "timed out" in low:
        text = "sudo did not answer in time on this host; try 'sudo true' there by hand"
    else:
        text = f"the first probe of this host failed: {' '.join(message.split())}"
    return Problem("", text)


def report(problems: Sequence[Problem], host: str) -> str:
    """Return one message with every problem, each on its own line."""
    unique = list(dict.fromkeys(str(problem) for problem in problems))
    count = "1 mistake" if len(unique) == 1 else f"{len(unique)} mistakes"
    lines = "\n".join(f"  - {line}" for line in unique)
    return f"{count} for host {quote(host)}; nothing was changed:\n{lines}"
