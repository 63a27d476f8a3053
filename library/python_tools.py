#!/usr/bin/python
"""Ansible module: the host's small venv of tools (uv, Hub client)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: python_tools
short_description: Keep a venv of tools equal to a hash-locked requirements text
description:
  - Builds the venv beside the present one and selects it by a symbolic link.
  - Unlike M(ansible.builtin.pip) it starts no pip when nothing is to be done, is right in check
    mode, and never leaves half an environment behind the path that is used.
options:
  path:
    description: The link under which the tools are used.
    type: path
    required: true
  python:
    description: Interpreter that makes the venv.
    type: path
    default: /usr/bin/python3
  requirements:
    description: Requirements with hashes, in pip's format. Needed unless O(state=absent).
    type: str
  index_url:
    description: Package index. Empty for the host's own pip configuration.
    type: str
    default: ""
  state:
    description: Whether the tools are wanted.
    type: str
    choices: [present, absent]
    default: present
author: vllm-turing
"""

EXAMPLES = r"""
- name: Install uv and the Hub client
  python_tools:
    path: /opt/vllm-turing/tools
    requirements: "{{ lookup('ansible.builtin.file', 'tools-requirements.txt') }}"
"""

RETURN = r"""
folder:
  description: The folder behind the link.
  returned: when O(state=present)
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import python_tools


def remove(module: AnsibleModule) -> None:
    """Remove the tools and end the module."""
    link = Path(module.params["path"])
    before = python_tools.leftovers(link)
    if before and not module.check_mode:
        try:
            python_tools.remove(link)
        except OSError as error:
            module.fail_json(msg=str(error))
    listing = "".join(f"{path}\n" for path in before)
    module.exit_json(changed=bool(before), diff={"before": listing, "after": ""})


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "requirements": {"type": "str"},
            "index_url": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ["requirements"])],
        supports_check_mode=True,
    )
    if module.params["state"] == "absent":
        remove(module)
    tools = python_tools.Tools(
        link=Path(module.params["path"]),
        python=module.params["python"],
        requirements=module.params["requirements"],
        index_url=module.params["index_url"],
    )
    changed = not tools.ready
    before = str(tools.link.readlink()) if tools.link.is_symlink() else "absent"
    if changed and not module.check_mode:
        try:
            python_tools.install(tools)
        except (python_tools.PythonToolsError, OSError) as error:
            module.fail_json(msg=str(error))
    module.exit_json(
        changed=changed,
        folder=str(tools.folder),
        diff={"before": f"{before}\n", "after": f"{tools.folder.name}\n"},
    )


if __name__ == "__main__":
    main()
