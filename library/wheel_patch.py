#!/usr/bin/python
"""Ansible module: patches on installed packages, applied or undone all together."""

from __future__ import annotations

DOCUMENTATION = r"""
module: wheel_patch
short_description: Apply or undo patches on installed packages and source checkouts
description:
  - Every patch names its files with their sha256 before and after. The digests decide the state
    (pristine, patched, not needed, foreign), so a second run changes nothing.
  - Applies without fuzz and all or nothing, over the whole list. Files are replaced, never written
    in place, because uv links them from its cache.
  - A file that is neither the released nor the patched one stops the module before anything is
    written.
options:
  patches:
    description: >-
      Patches in any order, each the mapping of its C(patch.yml) with the text of its diff under
      C(diff).
    type: list
    elements: dict
    required: true
  roots:
    description: >-
      Folder of C(site-packages), and of each source checkout by the name that its patches use as
      root.
    type: dict
    required: true
  state:
    description: Whether the patches are there or not.
    type: str
    choices: [applied, reverted]
    default: applied
author: vllm-turing
"""

EXAMPLES = r"""
- name: Apply the stack's patches
  wheel_patch:
    patches: "{{ patches }}"
    roots:
      site-packages: /opt/vllm-turing/current/venv/lib/python3.12/site-packages
      FlashQLA: /opt/vllm-turing/current/src/FlashQLA

- name: Take one of them back
  wheel_patch:
    patches: "{{ patches | selectattr('name', 'eq', 'vllm-hybrid-cache-hit') }}"
    roots:
      site-packages: /opt/vllm-turing/current/venv/lib/python3.12/site-packages
    state: reverted
"""

RETURN = r"""
patches:
  description: >-
    One entry per patch, in the order of application: name, package, version, state, the state
    before, and its files with the digests found and wanted.
  returned: always
  type: list
  elements: dict
changed_paths:
  description: Files that were (in check mode, would be) replaced.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import wheel_patch


def _text(content: bytes | None) -> str:
    return "" if content is None else content.decode("utf-8", "replace")


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "patches": {"type": "list", "elements": "dict", "required": True},
            "roots": {"type": "dict", "required": True},
            "state": {"type": "str", "choices": ["applied", "reverted"], "default": "applied"},
        },
        supports_check_mode=True,
    )
    roots = module.params["roots"]
    revert = module.params["state"] == "reverted"
    bring = wheel_patch.revert_all if revert else wheel_patch.apply_all
    outcomes: list[wheel_patch.Outcome] = []
    try:
        patches = [wheel_patch.from_mapping(data) for data in module.params["patches"]]
        outcomes = wheel_patch.states(patches, roots)
        changes = wheel_patch.file_changes(patches, roots, revert=revert)
        outcomes = bring(patches, roots, check=module.check_mode)
    except (wheel_patch.PatchError, OSError) as error:
        module.fail_json(msg=str(error), patches=[outcome.as_dict() for outcome in outcomes])
    module.exit_json(
        changed=bool(changes),
        changed_paths=[path for path, _before, _after in changes],
        patches=[outcome.as_dict() for outcome in outcomes],
        diff=[
            {
                "before_header": path,
                "after_header": path,
                "before": _text(before),
                "after": _text(after),
            }
            for path, before, after in changes
        ],
    )


if __name__ == "__main__":
    main()
