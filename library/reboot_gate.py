#!/usr/bin/python
"""Ansible module: whether the host must be rebooted for its driver, and whether it may be."""

from __future__ import annotations

DOCUMENTATION = r"""
module: reboot_gate
short_description: Decide from state whether a reboot is needed and safe
description:
  - Reads the loaded module, the libraries, the packages, the kernels that may boot next with
    their modules and initramfs, Secure Boot and half-done packages. Changes nothing.
options:
  fail_when_unsafe:
    description: Fail when a reboot is needed but would not bring a working driver.
    type: bool
    default: false
  after_reboot:
    description: The reasons of the reboot that was just done; fail when one is still needed.
    type: list
    elements: str
  unit:
    description: A unit that holds the cards; C(unit_active) tells whether it runs.
    type: str
    default: ""
  verify:
    description: Ask nvidia-smi too; fail when a card is not seen by the installed driver.
    type: bool
    default: false
attributes:
  check_mode: {support: full}
author: vllm-turing
"""

EXAMPLES = r"""
- name: Ask the gate
  reboot_gate:
  register: gate
"""

RETURN = r"""
needed:
  description: The driver works only after a reboot.
  returned: always
  type: bool
safe:
  description: The host would come up with a working driver.
  returned: always
  type: bool
reasons:
  description: Why a reboot is needed.
  returned: always
  type: list
  elements: str
refusals:
  description: Why it must not be done now, each with what to do.
  returned: always
  type: list
  elements: str
notes:
  description: What else is worth knowing.
  returned: always
  type: list
  elements: str
unit_active:
  description: A reboot is needed and the unit that holds the cards runs.
  returned: always
  type: bool
state:
  description: What was looked at.
  returned: always
  type: dict
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import reboot_gate
from ansible.module_utils.vllm_turing.deb_packages import DpkgError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "fail_when_unsafe": {"type": "bool", "default": False},
            "after_reboot": {"type": "list", "elements": "str"},
            "unit": {"type": "str", "default": ""},
            "verify": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        state = reboot_gate.collect()
    except DpkgError as error:
        module.fail_json(msg=str(error))
    decision = reboot_gate.decide(state)
    result = {
        **decision.as_dict(),
        "state": asdict(state),
        "unit_active": decision.needed and reboot_gate.unit_active(module.params["unit"]),
    }
    if module.params["after_reboot"] is not None:
        wrong = reboot_gate.after_reboot(decision, module.params["after_reboot"])
        if wrong:
            module.fail_json(
                msg="; ".join([*wrong, *decision.refusals]) + "; it is not rebooted again", **result
            )
    if module.params["verify"]:
        fault = reboot_gate.verify(state)
        if fault:
            module.fail_json(msg=fault, **result)
    if module.params["fail_when_unsafe"] and decision.needed and not decision.safe:
        module.fail_json(
            msg="a reboot is needed but refused: " + "; ".join(decision.refusals), **result
        )
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
