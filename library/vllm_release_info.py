#!/usr/bin/python
"""Ansible module: what a host has of a release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_release_info
short_description: Tell what a host has of a release
description:
  - Reads only, starts no program, and compares every patched file with its recorded digest.
options:
  prefix:
    description: Folder that holds C(releases/), C(current) and C(previous).
    type: path
    required: true
  fingerprint:
    description: The wanted release. Without it only the selected ones are told.
    type: str
    default: ""
author: vllm-turing
"""

EXAMPLES = r"""
- name: Look at the releases
  vllm_release_info:
    prefix: /opt/vllm-turing
    fingerprint: "{{ lookup('stack', 'vllm-0.24.0-cu129').fingerprint }}"
"""

RETURN = r"""
needs:
  description: C(nothing), C(patch) when patched files were replaced, or C(build).
  returned: always
  type: str
complete:
  description: Whether the wanted release was built to the end.
  returned: always
  type: bool
current:
  description: Fingerprint of the selected release, or empty.
  returned: always
  type: str
previous:
  description: Fingerprint of the release selected before, or empty.
  returned: always
  type: str
damage:
  description: What is no longer as it was built, one sentence each.
  returned: always
  type: list
  elements: str
path:
  description: Folder of the wanted release.
  returned: always
  type: str
mark:
  description: Completion mark of the wanted release, or an empty mapping.
  returned: always
  type: dict
releases:
  description: Fingerprints of all complete releases, the newest first.
  returned: always
  type: list
  elements: str
unfinished:
  description: Folders that builds left behind that broke off.
  returned: always
  type: list
  elements: str
"""

import dataclasses
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import release as releases


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "path", "required": True},
            "fingerprint": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    prefix = Path(module.params["prefix"])
    # An empty name is no release: its folder would be the one that holds all of them.
    wanted = releases.Release(prefix, module.params["fingerprint"] or "none")
    try:
        state = releases.probe(wanted)
        mark = wanted.mark() if wanted.complete else {}
        leftovers = releases.unfinished(prefix)
        names = [release.fingerprint for release in releases.releases(prefix)]
    except releases.ReleaseError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=False,
        path=str(wanted.path),
        mark=mark,
        releases=names,
        unfinished=leftovers,
        **dataclasses.asdict(state),
    )


if __name__ == "__main__":
    main()
