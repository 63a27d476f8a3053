#!/usr/bin/python
"""Ansible module: the cards' power limits now, and the unit that sets them at every boot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_gpu_power
short_description: Have the cards' power limits, now and after every boot
description:
  - Compares each card's limit with the wish brought into the card's bounds, and the state of the
    oneshot unit; sets what differs by starting that unit, and reads back.
options:
  unit: {description: The oneshot unit., type: str, required: true}
  limit_watts:
    description: Watts for every card; left out, limits are not touched.
    type: float
  devices:
    description: Watts for single cards, by UUID.
    type: dict
    default: {}
  reload:
    description: The unit's file has just changed.
    type: bool
    default: false
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: vllm-turing
"""

EXAMPLES = r"""
- name: Limit the cards to 200 W
  nvidia_gpu_power:
    unit: vllm-turing-gpu-power.service
    limit_watts: 200
"""

RETURN = r"""
cards:
  description: Every card with its limit in watts.
  returned: when the driver answers
  type: list
  elements: dict
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import gpu_power
from ansible.module_utils.vllm_turing.run import run


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "limit_watts": {"type": "float"},
            "devices": {"type": "dict", "default": {}},
            "reload": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    unit, watts = module.params["unit"], module.params["limit_watts"]
    devices = {}
    for uuid, value in module.params["devices"].items():
        try:
            devices[uuid] = float(value)
        except (TypeError, ValueError):
            module.fail_json(
                msg=f"gpu_power_devices['{uuid}'] is '{value}'; give watts, such as 200"
            )
    shown = run(["systemctl", "show", "-p", "UnitFileState,ActiveState", unit])
    fields = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
    enabled = fields.get("UnitFileState") == "enabled"
    active = fields.get("ActiveState") == "active"
    try:
        found = gpu_power.targets(gpu_power.read_cards(), watts, devices)
    except gpu_power.PowerError as error:
        if module.check_mode:
            # On a fresh box the driver is not there yet.
            module.exit_json(changed=True, cards=[], msg=f"would set the limits ({error})")
        module.fail_json(msg=str(error))
    settled = all(target.settled for target in found)
    reload = module.params["reload"] or not fields.get("UnitFileState")
    changed = not (enabled and active and settled) or reload
    before = "".join(_line(t.card.uuid, t.card.limit, t.card.persistence) for t in found)
    after = "".join(
        _line(t.card.uuid, t.card.limit if t.watts is None else t.watts, True) for t in found
    )
    cards = [asdict(target.card) for target in found]
    if changed and not module.check_mode:
        steps = [["systemctl", "daemon-reload"]] if reload else []
        steps += [["systemctl", "enable", unit]] if not enabled else []
        if reload or not (active and settled):
            steps.append(["systemctl", "restart", unit])
        for step in steps:
            result = run(step, timeout=180)
            if not result.ok:
                log = run(["journalctl", "-u", unit, "-n", "5", "-o", "cat", "--no-pager"])
                module.fail_json(
                    msg=f"'{' '.join(step)}' failed: "
                    + (log.stdout.strip() or result.error or result.stderr.strip())
                )
        try:
            now = gpu_power.read_cards()
        except gpu_power.PowerError as error:
            module.fail_json(msg=str(error))
        left = [t for t in gpu_power.targets(now, watts, devices) if not t.settled]
        if left:
            card = left[0].card
            module.fail_json(
                msg=f"card {card.uuid} reads back {card.limit:g} W, persistence "
                f"{'on' if card.persistence else 'off'}, although '{unit}' has run"
            )
        cards = [asdict(card) for card in now]
    for target in found:
        if target.note:
            module.warn(f"card {target.card.uuid}: {target.note}")
    module.exit_json(
        changed=changed,
        cards=cards,
        diff={
            "before": before + f"{unit} {'enabled' if enabled else 'not enabled'}\n",
            "after": after + f"{unit} enabled\n",
        },
    )


def _line(uuid: str, watts: float | None, persistence: bool) -> str:
    """Show one card for the diff."""
    limit = "no limit" if watts is None else f"{watts:g} W"
    return f"{uuid} {limit}, persistence {'on' if persistence else 'off'}\n"


if __name__ == "__main__":
    main()
