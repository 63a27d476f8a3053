#!/usr/bin/python
"""Ansible module: the API key of the server, made on the host once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_service_key
short_description: Generate the server's API key on the host, once
description:
  - Creates the file with 256 random bits when it is missing or empty, and keeps an existing key.
  - The key is never returned, logged or shown in a diff.
attributes:
  check_mode: {support: full}
  diff_mode: {support: full, description: Tells that a key would be made, never which.}
options:
  path:
    description: The key file. It belongs to root and is readable by root alone.
    type: path
    required: true
author: vllm-turing
"""

EXAMPLES = r"""
- name: Generate the API key
  vllm_service_key:
    path: /etc/vllm-turing/api-key
"""

RETURN = r"""
created:
  description: Whether a new key was made (or would be, in check mode).
  returned: always
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import service_key


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "required": True}}, supports_check_mode=True
    )
    path = module.params["path"]
    try:
        outcome = service_key.ensure(path, check_mode=module.check_mode)
    except OSError as error:
        module.fail_json(msg=f"the API key {path!r} cannot be written: {error.strerror}")
    diff = {"before": "", "after": ""}
    if outcome.created:
        diff = {"before": "no key\n", "after": "a key generated on the host\n"}
    elif outcome.tightened:
        diff = {"before": f"mode {outcome.mode:04o}\n", "after": "mode 0600\n"}
    header = {"before_header": path, "after_header": path}
    module.exit_json(
        changed=outcome.created or outcome.tightened,
        created=outcome.created,
        diff={**header, **diff},
    )


if __name__ == "__main__":
    main()
