#!/usr/bin/python
"""Ansible module: what the running vLLM service is and answers, asked on the host itself."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_probe
short_description: Ask the running vLLM service what it is and what it answers
description:
  - Read-only. Asks health, models and version, makes one real chat completion with the key that
    lies on the host, and reads the KV cache's size from the server's metrics.
  - The key is read on the host and is no part of the result.
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
options:
  settings:
    description: The settings file that the role vllm_service installed.
    type: path
    required: true
  key_path:
    description: File of the API key.
    type: path
  expected:
    description: Names and values to compare with; see docs/service.md.
    type: dict
    default: {}
  round_trips:
    description: Further questions to ask.
    type: list
    elements: str
    choices: [tool_call, reasoning, anthropic, image]
    default: []
  needle_tokens:
    description: Length of a long-context question in tokens; 0 leaves it out.
    type: int
    default: 0
  timeout:
    description: Seconds for one completion.
    type: int
    default: 300
author: vllm-turing
"""

EXAMPLES = r"""
- name: Ask the service
  vllm_probe:
    settings: /etc/vllm-turing/service.json
    key_path: /etc/vllm-turing/api-key
"""

RETURN = r"""
found:
  description: Everything that was seen.
  returned: always
  type: dict
report:
  description: C(versions), C(kv) and C(completion), as the closing report shows them.
  returned: always
  type: dict
rows:
  description: One entry an expectation, with C(name), C(expected), C(found) and C(ok).
  returned: always
  type: list
  elements: dict
table:
  description: The same as lines of text.
  returned: always
  type: list
  elements: str
failed_rows:
  description: Names of the expectations that are not met.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import service_probe, service_settings, service_verify


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "path", "required": True},
            "key_path": {"type": "path", "no_log": False},  # a path, not a key
            "expected": {"type": "dict", "default": {}},
            "round_trips": {
                "type": "list",
                "elements": "str",
                "choices": ["tool_call", "reasoning", "anthropic", "image"],
                "default": [],
            },
            "needle_tokens": {"type": "int", "default": 0},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        settings = service_settings.load(params["settings"])
    except service_settings.SettingsError as error:
        if module.check_mode:
            # A fresh box in check mode: the service that would be asked does not exist yet.
            empty = {"versions": {}, "kv": {}, "completion": {}}
            module.exit_json(
                changed=False, found={}, report=empty, rows=[], table=[], failed_rows=[]
            )
        module.fail_json(msg=str(error))
    found = service_probe.observe(
        settings,
        service_probe.read_key(params["key_path"]) if settings.api_key else None,
        round_trips=tuple(params["round_trips"]),
        needle_tokens=params["needle_tokens"],
        timeout=params["timeout"],
    )
    rows = service_verify.compare(params["expected"], found)
    report = {
        "versions": {"vllm": found["version"], **(found["release"].get("versions") or {})},
        "kv": found["kv"],
        "completion": found["completion"],
    }
    module.exit_json(
        changed=False,
        found=found,
        report=report,
        rows=[row.as_dict() for row in rows],
        table=service_verify.table(rows),
        failed_rows=[row.name for row in rows if not row.ok],
    )


if __name__ == "__main__":
    main()
