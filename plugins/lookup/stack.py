"""Ansible lookup: a software stack as data."""

from __future__ import annotations

DOCUMENTATION = r"""
name: stack
short_description: Read a software stack from the folder stacks/
description:
  - Reads C(stacks/<name>/stack.yml), its lock and its patches on the controller, checks them
    against C(stacks/schema.json), and returns one mapping.
options:
  _terms:
    description: Name of the stack. Exactly one.
    required: true
  optional_patches:
    description: Patches to add, from those that the stack offers.
    type: list
    elements: str
    default: []
  mirrors:
    description: Base URLs C(pytorch), C(vllm) and C(git). Without them no URL is resolved.
    type: dict
    default: {}
  python:
    description: Interpreter asked for. Part of the fingerprint.
    type: str
    default: ""
  cuda_toolkit_version:
    description: The toolkit that the host gets. Only compared; a difference appears in C(problems).
    type: str
    default: ""
  require_hashes:
    description: Whether a package without a hash is a problem.
    type: bool
    default: false
  root:
    description: The folder of the stacks. By default the project's own.
    type: path
author: vllm-turing
"""

EXAMPLES = r"""
- name: Show what a stack would install
  ansible.builtin.debug:
    msg: "{{ lookup('stack', 'vllm-0.24.0-cpu').versions }}"
"""

RETURN = r"""
_raw:
  description: >-
    One mapping with name, fingerprint, python, cuda, versions, compute_capabilities, environment,
    caches, build_tools, patches (names), indexes and sources (URLs resolved when mirrors are
    given), files (path to content, for the host) and problems (sentences).
  type: list
  elements: dict
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

_PROJECT = Path(__file__).resolve().parents[2]
# Ansible hands the folder module_utils to modules, not to plugins of the controller.
if str(_PROJECT / "module_utils") not in sys.path:
    sys.path.insert(0, str(_PROJECT / "module_utils"))

from vllm_turing import stack as stacks

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str) -> Any:
    """Read YAML text with the fast parser where there is one."""
    return yaml.load(text, Loader=_LOADER)


def schema_problem(root: Path, data: Any) -> str | None:
    """Return the first violation of the schema as a sentence, or ``None``."""
    # Here and not above: the import takes long, and every task starts in a process of its own.
    import jsonschema

    schema = json.loads((root / "schema.json").read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(data)
    )
    if error is None:
        return None
    where = ".".join(str(part) for part in error.absolute_path) or "the whole file"
    return f"{where}: {error.message}"


class LookupModule(LookupBase):  # type: ignore[misc]  # Ansible has no types
    """The lookup plugin."""

    def run(
        self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Read the stack that ``terms`` names."""
        self.set_options(var_options=variables, direct=kwargs)
        if len(terms) != 1:
            raise AnsibleLookupError("lookup 'stack' takes exactly one name of a stack")
        root = Path(self.get_option("root") or _PROJECT / "stacks")
        try:
            return [self._read(root, str(terms[0]))]
        except stacks.StackError as error:
            raise AnsibleLookupError(str(error)) from None

    def _read(self, root: Path, name: str) -> dict[str, Any]:
        if name in stacks.names(root):
            # First of all, so that the code behind it may rely on the shape of the data.
            data = parse_yaml((root / name / "stack.yml").read_text(encoding="utf-8"))
            problem = schema_problem(root, data)
            if problem:
                raise stacks.StackError(
                    f"stacks/{name}/stack.yml does not fit its schema: {problem}"
                )
        stack = stacks.load(root, name, parse_yaml, self.get_option("optional_patches"))
        python = self.get_option("python")
        fingerprint = stack.fingerprint(python)
        result = {
            key: stack.data[key]
            for key in (
                "name", "python", "engine", "cuda", "versions", "compute_capabilities",
                "environment", "caches", "build_tools", "indexes", "sources", "forbidden",
            )
        }  # fmt: skip
        mirrors = self.get_option("mirrors")
        if mirrors:
            result |= stack.resolved(mirrors)
        result["fingerprint"] = fingerprint
        result["patches"] = [patch["name"] for patch in stack.patches]
        result["files"] = stack.files(fingerprint)
        result["problems"] = stacks.problems(
            stack,
            cuda_toolkit_version=self.get_option("cuda_toolkit_version") or None,
            python=python,
            require_hashes=self.get_option("require_hashes"),
        )
        return result
