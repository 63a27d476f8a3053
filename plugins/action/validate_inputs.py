"""Controller side of ``validate_inputs``: every mistake of a host's inputs in one message."""

from __future__ import annotations

DOCUMENTATION = r"""
name: validate_inputs
short_description: Check all inputs of a host at once, without touching it
description:
  - Checks the host's variables against every role's C(meta/argument_specs.yml) (required values,
    types, choices), finds unknown variables that carry a role's prefix, unknown stacks, stacks
    that do not match the CUDA toolkit, unsupported hosts, paths with blanks and values that
    contradict each other.
  - Runs on the controller only; the host's answer to one earlier probe is handed in.
options:
  probe:
    description: What the probe of the host printed. Left out, the host itself is not checked.
    type: str
  probe_error:
    description: Why the probe failed, in Ansible's words.
    type: str
attributes:
  check_mode:
    support: full
"""

EXAMPLES = r"""
- name: Check all inputs at once
  validate_inputs:
    probe: "{{ __validate_probe.stdout }}"
"""

RETURN = r"""
problems:
  description: Every mistake, one sentence each.
  returned: always
  type: list
  elements: str
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

# Ansible finds module_utils for modules only; plugins of the controller have to name the folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "module_utils"))

from vllm_turing import preflight, stack, validate, validate_sources


def _yaml(text: str) -> Any:
    """Read the YAML of a stack."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class ActionModule(ActionBase):
    """Collect, check, and say everything in one message."""

    _supports_check_mode = True
    _supports_diff = False
    _requires_connection = False
    TRANSFERS_FILES = False

    def run(
        self, tmp: str | None = None, task_vars: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Check the inputs of one host."""
        variables = task_vars or {}
        result = super().run(tmp, variables)
        _, arguments = self.validate_argument_spec(
            argument_spec={"probe": {"type": "str"}, "probe_error": {"type": "str"}}
        )
        problems = self._problems(variables, arguments)
        result.update(changed=False, problems=[str(problem) for problem in problems])
        if problems:
            host = str(variables.get("inventory_hostname", "localhost"))
            result.update(failed=True, msg=validate.report(problems, host))
        return result

    def _problems(
        self, variables: dict[str, Any], arguments: dict[str, Any]
    ) -> list[validate.Problem]:
        """Return every mistake."""
        roles = validate_sources.read_roles(self._load)
        problems: list[validate.Problem] = []
        if arguments["probe_error"]:
            problems.append(validate.explain_failed_probe(arguments["probe_error"]))
        elif arguments["probe"] is not None:
            problems += validate.check_host(validate.parse_probe(arguments["probe"]))
        problems += validate.check_names(
            variables, {name: role.options for name, role in roles.items()}
        )
        values, broken = self._effective(roles, variables)
        problems += broken
        for role in roles.values():
            problems += validate.check_values(role.options, values)
            problems += validate.check_paths(role.options, values, variables)
            reported = {problem.variable for problem in problems}
            # Own defaults may hold what only the role can evaluate (its path, a lookup).
            given = {name: value for name, value in values.items() if name in variables}
            problems += self._remaining(role, given, reported)
        problems += validate.check_urls(values)
        problems += self._stack_problems(values)
        problems += validate.check_checks(values, preflight.check_ids(), preflight.GROUPS)
        problems += validate.check_rules(values)
        return problems

    def _load(self, path: str) -> Any:
        """Read one of the project's own YAML files; its templates are trusted."""
        return self._loader.load_from_file(path, trusted_as_template=True)

    def _effective(
        self, roles: dict[str, validate_sources.Role], variables: dict[str, Any]
    ) -> tuple[dict[str, Any], list[validate.Problem]]:
        """Evaluate the public variables, the roles' defaults below the host's own values."""
        available = {**validate_sources.all_defaults(roles), **variables}
        templar = self._templar.copy_with_new_env(available_variables=available)

        def template(value: Any) -> Any:
            try:
                return templar.template(value)
            except AnsibleError as error:
                raise validate_sources.TemplateError(" ".join(str(error).split())) from error

        return validate_sources.effective(roles, variables, template)

    @staticmethod
    def _stack_problems(values: dict[str, Any]) -> list[validate.Problem]:
        """Check the stack's name, and whether the toolkit and the Python fit it."""
        unknown = validate.check_stack(values, validate_sources.stack_names())
        name = values.get("vllm_runtime_stack")
        if unknown or not isinstance(name, str):
            return unknown
        patches = values.get("vllm_runtime_optional_patches")
        try:
            found = stack.load(
                validate_sources.PROJECT / "stacks",
                name,
                _yaml,
                patches if isinstance(patches, list) else (),
            )
            texts = stack.problems(
                found,
                cuda_toolkit_version=str(values.get("cuda_toolkit_version") or "") or None,
                python=str(values.get("vllm_runtime_python") or ""),
                require_hashes=values.get("vllm_runtime_require_hashes") is True,
            )
        except stack.StackError as error:
            texts = [str(error)]
        return [validate.Problem("", text) for text in texts]

    @staticmethod
    def _remaining(
        role: validate_sources.Role, given: dict[str, Any], reported: set[str]
    ) -> list[validate.Problem]:
        """Let Ansible's own validator look once more at given values without a problem so far."""
        options = {
            name: spec
            for name, spec in role.options.items()
            if name not in reported and name in given
        }
        outcome = ArgumentSpecValidator(options).validate({name: given[name] for name in options})
        return [validate.Problem("", str(message)) for message in outcome.error_messages]
