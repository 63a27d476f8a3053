#!/usr/bin/python
"""Ansible module: distribution packages that other roles build on."""

from __future__ import annotations

DOCUMENTATION = r"""
module: base_packages
short_description: See that distribution packages are installed
description:
  - Asks dpkg what is there, and apt only when something is missing. Waits for another package
    manager, names the holder of the lock, and never removes a package for a wanted one.
options:
  names:
    description: Package names.
    type: list
    elements: str
    required: true
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: vllm-turing
"""

EXAMPLES = r"""
- name: Install what the runtime is built with
  base_packages:
    names: [build-essential, git]
"""

RETURN = r"""
missing:
  description: Packages of the list that were not there.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import base_packages


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={"names": {"type": "list", "elements": "str", "required": True}},
        supports_check_mode=True,
    )
    try:
        plan = base_packages.make_plan(module.params["names"])
        if not module.check_mode:
            base_packages.install(plan)
    except base_packages.BasePackagesError as error:
        module.fail_json(msg=str(error))
    missing = list(plan.missing)
    before = [name for name in module.params["names"] if name not in missing]
    module.exit_json(
        changed=bool(missing),
        missing=missing,
        diff={
            "before": "".join(f"{name}\n" for name in sorted(before)),
            "after": "".join(f"{name}\n" for name in sorted(before + missing)),
        },
    )


if __name__ == "__main__":
    main()
