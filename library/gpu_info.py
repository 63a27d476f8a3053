#!/usr/bin/python
"""Ansible module: what can be known of the NVIDIA cards of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: Return facts about the NVIDIA cards of a host
description:
  - Asks C(nvidia-smi -q -x), C(nvlink -s), C(topo -m) and C(topo -p2p r), and falls back to the
    query, the list, C(/proc/driver/nvidia) and the PCI bus. Each call has a time limit; what a
    driver does not tell is null.
options: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author: vllm-turing
"""

EXAMPLES = r"""
- name: Look at the cards
  gpu_info:
  register: cards

- name: Show their memory
  ansible.builtin.debug:
    msg: "{{ cards.gpus | map(attribute='memory_total') }}"
"""

RETURN = r"""
gpus:
  description: >-
    Cards that the driver can use - index, name, uuid, bus_id, device_id, architecture,
    compute_capability, memory in MiB, power in watts, clocks in MHz, PCIe, processes.
  returned: always
  type: list
  elements: dict
source:
  description: The command that C(gpus) comes from; empty when there are none.
  returned: always
  type: str
silence:
  description: Why there is no card (C(not installed), C(no device), C(timed out after N s)...).
  returned: always
  type: str
lost:
  description: Bus ids of cards that the driver could not reach.
  returned: always
  type: list
  elements: str
module_version:
  description: Version of the loaded kernel module; empty when none is loaded.
  returned: always
  type: str
module_open:
  description: Whether it is the open flavour.
  returned: always
  type: bool
driver_version:
  description: Version that nvidia-smi tells.
  returned: always
  type: str
cuda_version:
  description: The newest CUDA release that the driver supports.
  returned: always
  type: str
pci:
  description: Cards on the PCI bus, with the kernel driver that owns each.
  returned: always
  type: list
  elements: dict
pci_source:
  description: Where C(pci) comes from.
  returned: always
  type: str
nvlink:
  description: Links of each card; C(gb_per_s) is null for an inactive one.
  returned: always
  type: list
  elements: dict
topology:
  description: How each pair of cards is connected (C(NV2), C(PHB)...).
  returned: always
  type: list
  elements: dict
p2p_read:
  description: Whether each pair may read each other's memory (C(OK), C(CNS)...).
  returned: always
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import gpu_facts
from ansible.module_utils.vllm_turing.preflight_host import Host


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    host = Host()
    host.prefetch(gpu_facts.COMMANDS)
    facts = gpu_facts.gather(host).as_dict()
    module.exit_json(changed=False, **facts)


if __name__ == "__main__":
    main()
