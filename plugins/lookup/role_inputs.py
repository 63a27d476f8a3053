"""Lookup ``role_inputs``: the public variables of all roles, as the roles would see them."""

from __future__ import annotations

DOCUMENTATION = r"""
name: role_inputs
short_description: All roles' public variables with the values that they have for this host
description:
  - Returns one mapping. A host's own values come before the roles' defaults. Variables that hold
    a secret (C(no_log)) and defaults that only the host can complete are left out.
  - The preflight role needs it, since it runs before the roles whose wishes it checks.
options: {}
"""

EXAMPLES = r"""
- name: Show the wanted driver
  ansible.builtin.debug:
    msg: "{{ lookup('role_inputs').nvidia_driver_version }}"
"""

RETURN = r"""
_raw:
  description: One mapping from variable to value.
  type: list
  elements: dict
"""

import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

# Ansible finds module_utils for modules only; plugins of the controller have to name the folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "module_utils"))

from vllm_turing import validate_sources


class LookupModule(LookupBase):
    """Collect the values."""

    def run(
        self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Return one mapping from public variable to value."""
        own = variables or {}
        roles = {
            name: validate_sources.Role(
                {option: spec for option, spec in role.options.items() if not spec.get("no_log")},
                role.defaults,
            )
            for name, role in validate_sources.read_roles(self._load).items()
        }
        available = {**validate_sources.all_defaults(roles), **own}
        templar = self._templar.copy_with_new_env(available_variables=available)

        def template(value: Any) -> Any:
            try:
                return templar.template(value)
            except AnsibleError as error:
                raise validate_sources.TemplateError(str(error)) from error

        values, _ = validate_sources.effective(roles, own, template)
        return [values]

    def _load(self, path: str) -> Any:
        return self._loader.load_from_file(path, trusted_as_template=True)
