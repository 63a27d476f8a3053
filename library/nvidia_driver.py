#!/usr/bin/python
"""Ansible module: one NVIDIA driver at one exact version, from one origin, held."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver
short_description: Install, change, hold or bring back the NVIDIA driver
description:
  - Compares the host's driver packages, holds, apt preferences, initramfs and persistence daemon
    with the wish, and does what is missing. On a host that is as wished it only reads.
  - Every transaction is simulated before anything is written; a driver package that would be
    installed, removed or changed against the wish stops the run with its name.
  - C(state=plan) only tells, C(state=restored) brings the previous driver back from the local
    package cache without network, C(state=released) lets go of the driver without touching it.
options:
  state:
    description: What to do.
    type: str
    choices: [plan, present, restored, released]
    default: present
  version:
    description: Exact version (C(580.159.03)) or a branch (C(580)), which is resolved and recorded.
    type: str
    required: true
  sources:
    description: Where the packages may come from, tried in this order for the exact version.
    type: list
    elements: dict
    required: true
    suboptions:
      name: {description: Name for messages and the record., type: str, required: true}
      origin: {description: C(Origin) of the archive's Release file., type: str, required: true}
      files:
        description: Apt files that make the source known, if the host does not have it.
        type: list
        elements: dict
        default: []
        suboptions:
          path: {description: Absolute path., type: str, required: true}
          content: {description: Whole content., type: str, required: true}
      key_url: {description: Where the signing key is., type: str, default: ""}
      key_fingerprint: {description: Fingerprint of that key., type: str, default: ""}
      key_path: {description: Where the key is stored., type: str, default: ""}
  state_dir:
    description: Folder of the record C(driver.json).
    type: path
    required: true
  cache_dir:
    description: Folder of the local package cache; owned by root.
    type: path
    required: true
  flavour:
    description: Kernel module; C(auto) keeps what is installed, else proprietary.
    type: str
    choices: [proprietary, open, auto]
    default: proprietary
  variant:
    description: Compute part only or with display; C(auto) keeps what is installed, else full.
    type: str
    choices: [auto, compute, full]
    default: auto
  modules:
    description: Kernel module built here (DKMS) or Ubuntu's signed one.
    type: str
    choices: [auto, dkms, prebuilt]
    default: auto
  when_gone:
    description: What to do when no source has the exact version any more.
    type: str
    choices: [nearest, stop]
    default: nearest
  hold:
    description: Hold the installed driver and kernel packages.
    type: bool
    default: true
  release_foreign_holds:
    description: Release holds that this project did not set, when they are in the way.
    type: bool
    default: false
  lock_timeout:
    description: Seconds to wait for another package manager.
    type: int
    default: 600
  unit:
    description: A unit that holds the cards; C(unit_active) tells whether it runs.
    type: str
    default: ""
  reason:
    description: Why the previous driver is brought back, for the record.
    type: str
    default: ""
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: vllm-turing
"""

EXAMPLES = r"""
- name: Have exactly this driver
  nvidia_driver:
    version: 580.159.03
    sources:
      - name: ubuntu
        origin: Ubuntu
    state_dir: /var/lib/vllm-turing
    cache_dir: /var/cache/vllm-turing/driver
"""

RETURN = r"""
action:
  description: C(none), C(repair), C(install) or C(change).
  returned: always
  type: str
steps:
  description: Every step in words.
  returned: always
  type: list
  elements: str
version:
  description: The driver's exact version.
  returned: unless O(state=released)
  type: str
package_version:
  description: The packages' version.
  returned: always
  type: str
source:
  description: Name of the source.
  returned: always
  type: str
difference:
  description: One sentence when it is not the version asked for, else empty.
  returned: always
  type: str
unit_active:
  description: Something changes and the unit that holds the cards runs.
  returned: when O(state=plan)
  type: bool
packages:
  description: Driver packages with their versions, as they are or will be.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import apt_source, nvidia_apply
from ansible.module_utils.vllm_turing import nvidia_driver as driver
from ansible.module_utils.vllm_turing.apt_client import AptError
from ansible.module_utils.vllm_turing.deb_packages import DpkgError
from ansible.module_utils.vllm_turing.reboot_gate import unit_active


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "choices": ["plan", "present", "restored", "released"],
                "default": "present",
            },
            "version": {"type": "str", "required": True},
            "sources": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": apt_source.OPTIONS,
            },
            "state_dir": {"type": "path", "required": True},
            "cache_dir": {"type": "path", "required": True},
            "flavour": {
                "type": "str",
                "choices": ["proprietary", "open", "auto"],
                "default": "proprietary",
            },
            "variant": {"type": "str", "choices": ["auto", "compute", "full"], "default": "auto"},
            "modules": {"type": "str", "choices": ["auto", "dkms", "prebuilt"], "default": "auto"},
            "when_gone": {"type": "str", "choices": ["nearest", "stop"], "default": "nearest"},
            "hold": {"type": "bool", "default": True},
            "release_foreign_holds": {"type": "bool", "default": False},
            "lock_timeout": {"type": "int", "default": 600},
            "unit": {"type": "str", "default": ""},
            "reason": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params
    wish = driver.Wish(
        version=params["version"],
        sources=[apt_source.from_parameters(entry) for entry in params["sources"]],
        state_dir=params["state_dir"],
        cache_dir=params["cache_dir"],
        flavour=params["flavour"],
        variant=params["variant"],
        modules=params["modules"],
        when_gone=params["when_gone"],
        hold=params["hold"],
        release_foreign_holds=params["release_foreign_holds"],
        lock_timeout=params["lock_timeout"],
    )
    try:
        host = driver.read_host(wish, refresh=not module.check_mode)
        if params["state"] == "restored":
            _restore(module, wish, host)
        if params["state"] == "released":
            _release(module, wish, host)
        plan = driver.make_plan(wish, host)
        result = driver.describe(plan)
        if params["state"] == "plan":
            # What a plan warns of, the steps that carry it out say; a host as wished says it here.
            for warning in result.pop("warnings") if plan.action == "none" else []:
                module.warn(warning)
            result.pop("warnings", None)
            active = plan.action == "change" and unit_active(params["unit"])
            module.exit_json(changed=False, unit_active=active, **result)
        before = driver.as_text(plan.before, plan.held)
        if plan.changes and not module.check_mode:
            result["warnings"] += nvidia_apply.apply(plan, wish, host)
            now = driver.read_host(wish)
            after = driver.as_text(driver.installed_drivers(now.packages), driver.held(now))
        else:
            after = driver.as_text(plan.after, {*plan.held, *plan.hold} - set(plan.unhold))
            if plan.arguments or plan.debs:
                after = driver.as_text(plan.after, plan.hold)
    except (driver.Refusal, nvidia_apply.ApplyError, AptError, DpkgError) as error:
        module.fail_json(msg=str(error))
    for warning in result.pop("warnings"):
        module.warn(warning)
    module.exit_json(
        changed=plan.changes,
        diff={
            "before_header": "driver packages and holds",
            "after_header": "driver packages and holds",
            "before": before,
            "after": after,
        },
        **result,
    )


def _restore(module: AnsibleModule, wish: driver.Wish, host: driver.Host) -> None:
    """Bring the previous driver back."""
    data, _debs, _going = nvidia_apply.way_back(wish, host)
    wanted = dict(data["packages"])
    gone = set(driver.installed_drivers(host.packages)) - set(wanted)
    held = (set(driver.held(host)) | set(data.get("held", []))) - gone
    changed = not nvidia_apply.is_back(data, host)
    before = driver.as_text(driver.installed_drivers(host.packages), driver.held(host))
    if changed and not module.check_mode:
        nvidia_apply.restore(wish, host, module.params["reason"])
    module.exit_json(
        changed=changed,
        action="change" if changed else "none",
        version=data["record"].get("resolved") or str(data["package_version"]).split("-", 1)[0],
        package_version=data["package_version"],
        source="cache",
        difference=data["record"].get("difference", ""),
        steps=[f"bring back driver {data['package_version']} from the local package cache"]
        if changed
        else [],
        packages=wanted,
        diff={"before": before, "after": driver.as_text(wanted, held)},
    )


def _release(module: AnsibleModule, wish: driver.Wish, host: driver.Host) -> None:
    """Take off our holds, the pin and the record; the driver stays installed."""
    let_go = nvidia_apply.release(wish, host, check=module.check_mode)
    module.exit_json(
        changed=bool(let_go),
        action="repair" if let_go else "none",
        steps=let_go,
        packages=driver.installed_drivers(host.packages),
        diff={"before": "".join(f"{line}\n" for line in let_go), "after": ""},
    )


if __name__ == "__main__":
    main()
