"""Filters of the role vllm_service: vLLM's flags and systemd's quoting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

_LIBRARY = str(Path(__file__).resolve().parents[2] / "module_utils")
if _LIBRARY not in sys.path:
    # Filters run on the controller, where Ansible puts module_utils on no import path.
    sys.path.append(_LIBRARY)

from vllm_turing import service_launch, service_settings, systemd_unit, vllm_args


def _plain(value: Any) -> Any:
    """Return Ansible's tagged values as the plain ones that they are."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn the library's one-sentence errors into Ansible's."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (vllm_args.ArgsError, systemd_unit.UnitError) as error:
            raise AnsibleFilterError(str(error)) from error

    return guarded


def vllm_args_merge(args: Mapping[str, Any], custom: Mapping[str, Any]) -> dict[str, Any]:
    """Lay custom flags over the role's; null removes."""
    return vllm_args.merge(_plain(args), _plain(custom))


def vllm_config_yaml(args: Mapping[str, Any]) -> str:
    """Write the flags as the file that vLLM's ``--config`` reads, without a line end at the end."""
    return vllm_args.to_yaml(_plain(args)).rstrip("\n")


def vllm_effective_argv(args: Mapping[str, Any]) -> list[str]:
    """Return the arguments that vLLM makes of the file."""
    return vllm_args.to_argv(_plain(args))


def vllm_text_digest(text: str) -> str:
    """Return the sha256 of a file's meaning (comments and blank lines aside)."""
    return service_launch.text_digest(str(text))


def vllm_cache_environment(stack: Mapping[str, Any], cache_dir: str) -> dict[str, str]:
    """Return the variables by which the launcher gives a release of a stack its own caches."""
    return service_settings.cache_environment(
        str(cache_dir), str(stack["fingerprint"]), _plain(stack["caches"])
    )


def without_null(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Drop null values; the others become text, as an environment holds it."""
    return {str(key): str(value) for key, value in mapping.items() if value is not None}


def systemd_command(words: Iterable[str]) -> str:
    """Join words into the value of ``ExecStart=``."""
    return systemd_unit.command_line(str(word) for word in words)


def systemd_word(word: str) -> str:
    """Quote one word of a list of paths, where ``$`` has no meaning."""
    return systemd_unit.quote(str(word), command=False)


def systemd_text(text: str) -> str:
    """Return a value that takes the whole line: only specifiers have to be doubled."""
    line = " ".join(str(text).split("\n"))
    return line.replace("%", "%%")


def systemd_assignment(value: str, name: str) -> str:
    """Return the value of one ``Environment=`` line."""
    return systemd_unit.assignment(str(name), str(value))


class FilterModule:
    """Offers the filters to Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters of this file by name."""
        functions = (
            vllm_args_merge, vllm_config_yaml, vllm_effective_argv, vllm_text_digest,
            vllm_cache_environment, without_null,
            systemd_command, systemd_word, systemd_text, systemd_assignment,
        )  # fmt: skip
        return {function.__name__: _guarded(function) for function in functions}
