"""Collect what the roles declare, and the values that would reach them.

The controller's plugins hand in how a YAML file is read and how a template is evaluated, so that
this stays free of Ansible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .validate import Problem, quote

#: The folder with roles/, stacks/ and playbooks/: two above module_utils/vllm_turing.
PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Role:
    """What one role declares.

    :ivar options: its public options, from ``meta/argument_specs.yml``
    :ivar defaults: their defaults, from ``defaults/main.yml``, not yet templated, and the role's
        private variables, which a default may name
    """

    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)


class TemplateError(Exception):
    """A value could not be evaluated; the text says why."""


def read_roles(load: Callable[[str], Any], project: Path = PROJECT) -> dict[str, Role]:
    """Read every role's options (all entry points together) and defaults.

    :param load: reads one YAML file, given its path
    :param project: the folder that holds ``roles``
    """
    roles = {}
    for spec_file in sorted(project.glob("roles/*/meta/argument_specs.yml")):
        folder = spec_file.parents[1]
        specs = (load(str(spec_file)) or {}).get("argument_specs", {})
        options: dict[str, dict[str, Any]] = {}
        for entry in specs.values():
            options.update(entry.get("options") or {})
        defaults: dict[str, Any] = {}
        # A default may name the role's private variables.
        for part in ("vars", "defaults"):
            file = folder / part / "main.yml"
            defaults.update((load(str(file)) if file.is_file() else None) or {})
        roles[folder.name] = Role(options, defaults)
    return roles


def stack_names(project: Path = PROJECT) -> list[str]:
    """Return the names of the software stacks."""
    return sorted(file.parent.name for file in project.glob("stacks/*/stack.yml"))


def all_defaults(roles: Mapping[str, Role]) -> dict[str, Any]:
    """Return the defaults of every role in one mapping."""
    return {name: value for role in roles.values() for name, value in role.defaults.items()}


def effective(
    roles: Mapping[str, Role],
    variables: Mapping[str, Any],
    template: Callable[[Any], Any],
) -> tuple[dict[str, Any], list[Problem]]:
    """Evaluate every public variable as its role would see it.

    A role's own default that needs something only the host can tell (a fact, a registered result)
    cannot be known here and is left out; the same in a value of the inventory is a problem.

    :param roles: see :func:`read_roles`
    :param variables: the host's variables
    :param template: evaluates a value; raises :class:`TemplateError`
    :returns: the values, and what could not be evaluated
    """
    defaults = all_defaults(roles)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for role in roles.values():
        for name, spec in role.options.items():
            if name in variables:
                raw = variables[name]
            elif name in defaults:
                raw = defaults[name]
            else:
                continue
            try:
                values[name] = template(raw)
            except TemplateError as error:
                own_default = name in defaults and raw == defaults[name]
                if not own_default and "ansible_facts" not in str(raw):
                    shown = quote(raw, bool(spec.get("no_log")))
                    problems.append(Problem(name, f"{shown} cannot be evaluated: {error}"))
    return values, problems
