#!/usr/bin/python
"""Ansible module: an archive's key by its fingerprint, and source files that let apt run."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_signing_key
short_description: Store an archive's signing key, and put right sources that stop apt
description:
  - Fetches the key only when the stored one is missing or another one, and stores it only when
    its fingerprint is the wanted one.
  - Finds, by parsing, source files that declare one archive with different keys (every apt call
    fails then) or name a key or a local archive that is not there, and switches them off with a
    backup beside.
options:
  url: {description: Where the key is., type: str, required: true}
  fingerprint: {description: Fingerprint that it must have., type: str, required: true}
  path: {description: Where it is stored., type: path, required: true}
  own_sources:
    description: Source files of this project; where two files are in conflict they stay.
    type: list
    elements: path
    default: []
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: vllm-turing
"""

EXAMPLES = r"""
- name: Trust NVIDIA's repository
  apt_signing_key:
    url: https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/3bf863cc.pub
    fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
    path: /etc/apt/keyrings/vllm-turing-nvidia.gpg
    own_sources: [/etc/apt/sources.list.d/vllm-turing-nvidia.sources]
"""

RETURN = r"""
findings:
  description: What was found in the source files.
  returned: always
  type: list
  elements: str
backups:
  description: Files that keep what was switched off.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import apt_key, apt_source, apt_sources


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "fingerprint": {"type": "str", "required": True},
            "path": {"type": "path", "required": True},
            "own_sources": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    source = apt_source.Source("", "", {}, params["url"], params["fingerprint"], params["path"])
    have_key = apt_source.key_is_right(source)
    findings = apt_sources.find(apt_sources.read_all(), params["own_sources"])
    try:
        repairs = apt_sources.repair(findings, check=module.check_mode)
        if not have_key and not module.check_mode:
            apt_source.write(Path("/"), params["path"], apt_source.fetch_key(source))
    except apt_key.KeyProblem as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"'{error.filename}' cannot be written: {error.strerror}")
    for finding in findings:
        if not finding.disable:
            module.warn(finding.message)
    diff = [
        {
            "before_header": repair.path,
            "after_header": repair.path if repair.after is not None else repair.backup,
            "before": repair.before,
            "after": repair.after or "",
        }
        for repair in repairs
    ]
    if not have_key:
        line = f"{apt_key.normalise(params['fingerprint'])}\n"
        diff.append(
            {
                "before_header": params["path"],
                "after_header": params["path"],
                "before": "",
                "after": line,
            }
        )
    module.exit_json(
        changed=bool(repairs) or not have_key,
        findings=[finding.message for finding in findings],
        backups=[repair.backup for repair in repairs],
        diff=diff,
    )


if __name__ == "__main__":
    main()
