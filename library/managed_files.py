#!/usr/bin/python
"""Ansible module: folders, files, links and absences of one role in one step."""

from __future__ import annotations

DOCUMENTATION = r"""
module: managed_files
short_description: Bring a list of folders, files and links to the wanted state
description:
  - Does in one remote step what a loop of C(file), C(copy) and C(template) tasks does in many.
  - Files are replaced atomically; parents of files are created.
  - With O(root) other than C(/) the same list is written below that folder, without owners, which
    is how C(playbooks/render.yml) shows what a host would get.
options:
  root:
    description: The folder that stands for C(/).
    type: path
    default: /
  directories:
    description: Folders.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Absolute path., type: str, required: true}
      mode: {description: Octal mode., type: str, default: "0755"}
      owner: {description: Owner., type: str, default: root}
      group: {description: Group., type: str, default: root}
  files:
    description: Files with their whole content.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Absolute path., type: str, required: true}
      content: {description: The whole content., type: str, required: true}
      mode: {description: Octal mode., type: str, default: "0644"}
      owner: {description: Owner., type: str, default: root}
      group: {description: Group., type: str, default: root}
      sensitive: {description: Keep the content out of the diff., type: bool, default: false}
  links:
    description: Symbolic links, replaced atomically.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Absolute path of the link., type: str, required: true}
      target: {description: What it points to., type: str, required: true}
  absent:
    description: Files, links and empty folders to remove.
    type: list
    elements: str
    default: []
author: vllm-turing
"""

EXAMPLES = r"""
- name: Install the unit and its folder
  managed_files:
    directories:
      - path: /etc/vllm-turing
    files:
      - path: /etc/systemd/system/vllm-turing.service
        content: "{{ lookup('ansible.builtin.template', 'vllm-turing.service.j2') }}"
"""

RETURN = r"""
changed_paths:
  description: Paths, as on the host, that differed from the wish.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import managed_files


def main() -> None:
    """Run the module."""
    owned = {
        "path": {"type": "str", "required": True},
        "owner": {"type": "str", "default": "root"},
        "group": {"type": "str", "default": "root"},
    }
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/"},
            "directories": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {**owned, "mode": {"type": "str", "default": "0755"}},
            },
            "files": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    **owned,
                    "mode": {"type": "str", "default": "0644"},
                    "content": {"type": "str", "required": True},
                    "sensitive": {"type": "bool", "default": False},
                },
            },
            "links": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "str", "required": True},
                    "target": {"type": "str", "required": True},
                },
            },
            "absent": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        outcome = managed_files.apply(check_mode=module.check_mode, **module.params)
    except (managed_files.ManagedFilesError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=outcome.changed, changed_paths=outcome.changed_paths, diff=outcome.diffs
    )


if __name__ == "__main__":
    main()
