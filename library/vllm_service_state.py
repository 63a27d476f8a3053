#!/usr/bin/python
"""Ansible module: the service runs what is wanted, and is restarted only for a difference."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_service_state
short_description: Drain, switch, start and check the vLLM service, only when something differs
description:
  - Compares what the running engine was started with (release, flags, unit, environment, key,
    model revision) with what is wanted. No difference, no action.
  - Before a running service is touched its flags are checked against the installed vLLM's own
    parser, once for each release and configuration.
  - When the new state does not get ready, the last good release, unit and flags are put back and
    started, and the module fails with the reason and the last log lines.
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
options:
  name: {description: Name of the unit without C(.service)., type: str, required: true}
  state:
    description: Wanted state; V(paused) stops without disabling.
    type: str
    choices: [started, stopped, paused]
    default: started
  files:
    description: Path and content of the installed unit, flags and settings.
    type: list
    elements: dict
    required: true
    suboptions:
      path: {description: Absolute path., type: str, required: true}
      content: {description: The whole content., type: str, required: true}
  unit_path: {description: Which of the files is the unit., type: str, required: true}
  config_path: {description: Which of the files holds the flags., type: str, required: true}
  settings_path: {description: Which of the files holds the settings., type: str, required: true}
  unit_digest: {description: Digest that the unit hands to the launcher., type: str, required: true}
  environment: {description: Environment that the unit sets., type: dict, required: true}
  release: {description: Fingerprint of the wanted release; empty keeps the present one., type: str}
  release_path: {description: Folder of that release., type: str}
  release_link: {description: Link to the release that runs., type: str, required: true}
  previous_link: {description: Link to the last good release before it., type: str, required: true}
  key_path: {description: File of the API key; empty for a server without one., type: str}
  user: {description: The service's user., type: str, required: true}
  library: {description: Folder of this project's package on the host., type: str, required: true}
  data_dir: {description: Where the last good state is kept; root's own., type: str, required: true}
  drain_timeout: {description: Seconds that running requests get., type: int, default: 180}
  log_file: {description: The log file, when the service does not log to the journal., type: str}
author: vllm-turing
"""

EXAMPLES = r"""
- name: Run the service as wanted
  vllm_service_state:
    name: vllm-turing
    state: started
    files: "{{ __vllm_service_files }}"
    unit_path: /etc/systemd/system/vllm-turing.service
    config_path: /etc/vllm-turing/vllm.yaml
    settings_path: /etc/vllm-turing/service.json
    unit_digest: "{{ __vllm_service_unit_digest }}"
    environment: "{{ __vllm_service_environment }}"
    release_link: /opt/vllm-turing/current
    previous_link: /opt/vllm-turing/previous
    key_path: /etc/vllm-turing/api-key
    user: vllm
    library: /opt/vllm-turing/lib
    data_dir: /opt/vllm-turing/service
"""

RETURN = r"""
steps:
  description: What was done, or would be in check mode.
  returned: always
  type: list
  elements: str
reasons:
  description: Why.
  returned: always
  type: list
  elements: str
log:
  description: The service's last log lines.
  returned: on failure
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import service_settings, service_state


def main() -> None:
    """Run the module."""
    text = {"type": "str", "required": True}
    module = AnsibleModule(
        argument_spec={
            "name": text,
            "state": {
                "type": "str",
                "choices": ["started", "stopped", "paused"],
                "default": "started",
            },
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {"path": text, "content": text},
            },
            "unit_path": text,
            "config_path": text,
            "settings_path": text,
            "unit_digest": text,
            "environment": {"type": "dict", "required": True},
            "release": {"type": "str"},
            "release_path": {"type": "str"},
            "release_link": text,
            "previous_link": text,
            "key_path": {"type": "str", "no_log": False},  # a path, not a key
            "user": text,
            "library": text,
            "data_dir": text,
            "drain_timeout": {"type": "int", "default": 180},
            "log_file": {"type": "str"},
        },
        supports_check_mode=True,
    )
    try:
        wanted = service_state.from_params(module.params)
        observed = service_state.observe(wanted)
        todo = service_state.plan(wanted, observed)
        result = {"changed": todo.changed, "steps": todo.steps(), "reasons": list(todo.reasons)}
        if todo.start or todo.stop:
            problems = service_state.check_flags(wanted, observed)
            if problems:
                undone = (
                    not module.check_mode and service_state.Change(wanted, observed).restore_files()
                )
                tail = "; the running service and its files stay as they were" if undone else ""
                module.fail_json(
                    msg=f"vllm_service_args: {'; '.join(problems)}{tail}",
                    problems=problems,
                    **{**result, "changed": False},
                )
        if todo.changed:
            why = ", ".join(todo.reasons) or "not as wanted"
            result["diff"] = {
                "before_header": wanted.unit,
                "after_header": wanted.unit,
                "before": f"{observed.active} ({why})\n",
                "after": "".join(f"{step}\n" for step in todo.steps()),
            }
            if not module.check_mode:
                service_state.Change(wanted, observed).carry_out(todo)
    except service_settings.SettingsError as error:
        module.fail_json(msg=str(error))
    except service_state.StateError as error:
        module.fail_json(msg=str(error), log=error.log)
    except OSError as error:
        module.fail_json(msg=f"{error.filename or 'the service'}: {error.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
