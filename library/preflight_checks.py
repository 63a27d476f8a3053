#!/usr/bin/python
"""Ansible module: every preflight check of a host in one read-only call."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_checks
short_description: Find everything that would go wrong on a host, before it does
description:
  - Runs all checks of hardware, system, driver, CUDA, runtime, model, network, service and plan,
    or the chosen ones, and returns one finding for each.
  - Changes nothing, also outside check mode. Each external command has a time limit. The module
    does not fail for what it finds; I(report.rc) says whether the run should stop.
options:
  wish:
    description: The roles' public variables. What is left out has the roles' defaults.
    type: dict
    default: {}
  stack:
    description: The software stack's data (C(python), C(cuda), C(versions), C(forbidden)...).
    type: dict
    default: {}
  site_follows:
    description: Whether site.yml follows at once; what it mends itself is then only a warning.
    type: bool
    default: false
  only:
    description: Ids or groups to run; all when empty.
    type: list
    elements: str
    default: []
  skip:
    description: Ids or groups to leave out.
    type: list
    elements: str
    default: []
  accept:
    description: Ids whose failure or warning is known and accepted.
    type: list
    elements: str
    default: []
  strict:
    description: Whether warnings stop, too.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: vllm-turing
"""

EXAMPLES = r"""
- name: Check a host
  preflight_checks:
    accept: [nvlink_links]
  register: result

- name: Show what was found
  ansible.builtin.debug:
    msg: "{{ result.table }}"
"""

RETURN = r"""
report:
  description: All findings, worst first; docs/preflight-schema.json describes it.
  returned: always
  type: dict
table:
  description: The report for a terminal.
  returned: always
  type: str
stop:
  description: The message to stop with; empty when nothing stops.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import preflight
from ansible.module_utils.vllm_turing.preflight_host import Host
from ansible.module_utils.vllm_turing.preflight_wish import Wish


def main() -> None:
    """Run the module."""
    names = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "wish": {"type": "dict", "default": {}},
            "stack": {"type": "dict", "default": {}},
            "site_follows": {"type": "bool", "default": False},
            "only": names,
            "skip": names,
            "accept": names,
            "strict": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    try:
        report = preflight.run_checks(
            Host(),
            Wish(wanted["wish"], wanted["site_follows"], wanted["stack"]),
            only=wanted["only"],
            skip=wanted["skip"],
            accept=wanted["accept"],
            strict=wanted["strict"],
        ).as_dict()
    except ValueError as error:
        module.fail_json(msg=str(error))
    stop = preflight.stop_message(report) if report["rc"] else ""
    module.exit_json(changed=False, report=report, table=preflight.table(report), stop=stop)


if __name__ == "__main__":
    main()
