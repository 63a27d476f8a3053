#!/usr/bin/python
"""Ansible module: packages of a CUDA toolkit, side by side with others, never moving the driver."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_cuda_toolkit
short_description: Install packages of one CUDA toolkit
description:
  - Installs what is missing of the list. The transaction is simulated first and refused when it
    would install, change or remove any driver package, or remove anything at all.
  - An existing C(/usr/local/cuda) stays what it is.
options:
  packages:
    description: Packages to have.
    type: list
    elements: str
    required: true
  version:
    description: Release that the toolkit's nvcc must report.
    type: str
    required: true
  home:
    description: Folder of the toolkit.
    type: path
    required: true
  source:
    description: The repository, as for M(nvidia_driver).
    type: dict
    required: true
    options:
      name: {description: Name for messages., type: str, required: true}
      origin: {description: C(Origin) of the archive's Release file., type: str, required: true}
      files:
        description: Apt files that make the source known.
        type: list
        elements: dict
        default: []
        suboptions:
          path: {description: Absolute path., type: str, required: true}
          content: {description: Whole content., type: str, required: true}
      key_url: {description: Where the signing key is., type: str, default: ""}
      key_fingerprint: {description: Fingerprint of that key., type: str, default: ""}
      key_path: {description: Where the key is stored., type: str, default: ""}
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: vllm-turing
"""

EXAMPLES = r"""
- name: Have a compiler and the headers that JIT needs
  nvidia_cuda_toolkit:
    packages: [cuda-nvcc-12-9, cuda-cudart-dev-12-9]
    version: "12.9"
    home: /usr/local/cuda-12.9
    source:
      name: nvidia
      origin: NVIDIA
"""

RETURN = r"""
missing:
  description: Packages of the list that were not there.
  returned: always
  type: list
  elements: str
installs:
  description: What apt installs for them.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import apt_source, nvidia_toolkit


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "required": True},
            "version": {"type": "str", "required": True},
            "home": {"type": "path", "required": True},
            "source": {"type": "dict", "required": True, "options": apt_source.OPTIONS},
        },
        supports_check_mode=True,
    )
    params = module.params
    archive = apt_source.from_parameters(params["source"])
    try:
        plan = nvidia_toolkit.make_plan(params["packages"], archive, refresh=not module.check_mode)
        if plan.missing and not module.check_mode:
            nvidia_toolkit.apply(plan, params["home"], params["version"])
        elif not plan.missing:
            nvidia_toolkit.check(params["home"], params["version"])
    except nvidia_toolkit.ToolkitError as error:
        module.fail_json(msg=str(error))
    for warning in plan.warnings:
        module.warn(warning)
    after = {**plan.before, **plan.installs}
    module.exit_json(
        changed=bool(plan.missing),
        missing=plan.missing,
        installs=plan.installs,
        diff={
            "before": "".join(f"{n} {v}\n" for n, v in sorted(plan.before.items())),
            "after": "".join(f"{n} {v}\n" for n, v in sorted(after.items())),
        },
    )


if __name__ == "__main__":
    main()
