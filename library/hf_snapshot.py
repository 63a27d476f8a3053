#!/usr/bin/python
"""Ansible module: a model at a locked revision, fetched in the background by its own unit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hf_snapshot
short_description: Have a model from the Hugging Face Hub at a locked revision
description:
  - Tells whether the model is complete, starts the unit that fetches it, or waits for it.
  - The work is done on the host by C(vllm-turing-model.service), which goes on when the
    connection, the controller or the power is lost.
  - A complete model is recognised by its manifest in milliseconds, whatever its size.
options:
  config:
    description: The settings of the fetch, as in C(model.json) on the host.
    type: dict
    required: true
  state:
    description:
      - With C(started) the unit is started unless the model is complete or it runs already.
      - With C(present) the module waits for the model, and starts nothing.
      - With C(probed) it only looks.
      - With C(absent) the unit is stopped and, with O(data=true), the model's files are removed.
    type: str
    choices: [started, present, probed, absent]
    default: present
  wait:
    description: Seconds to wait for the model at most, with O(state=present).
    type: float
    default: 10
  verify:
    description:
      - With C(auto) files are read again only if their size, times or inode changed.
      - With C(full) all of them are read again.
    type: str
    choices: [auto, full]
    default: auto
  data:
    description: Remove the model's files too, with O(state=absent).
    type: bool
    default: false
author: vllm-turing
"""

EXAMPLES = r"""
- name: Start fetching the model
  hf_snapshot:
    config:
      repo: Qwen/Qwen3.6-27B-FP8
      revision: main
      name: Qwen3.6-27B-FP8
      store: /var/lib/vllm-turing/models
      link: /var/lib/vllm-turing/models/Qwen3.6-27B-FP8
      sources: [https://huggingface.co]
    state: started
"""

RETURN = r"""
complete:
  description: Whether the link leads to verified files of the locked revision.
  returned: always
  type: bool
running:
  description: Whether the unit is at work, or waits for its next try.
  returned: always
  type: bool
commit:
  description: The locked commit; empty while none is locked.
  returned: always
  type: str
folder:
  description: The folder of the revision in use; empty while it is not complete.
  returned: always
  type: str
size:
  description: Bytes of all files; 0 while no revision is locked.
  returned: always
  type: int
progress:
  description: How far it is, as one line.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import model_state
from ansible.module_utils.vllm_turing.model_lock import ModelError
from ansible.module_utils.vllm_turing.model_store import Config, Store


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "config": {"type": "dict", "required": True},
            "state": {
                "type": "str",
                "choices": ["started", "present", "probed", "absent"],
                "default": "present",
            },
            "wait": {"type": "float", "default": 10.0},
            "verify": {"type": "str", "choices": ["auto", "full"], "default": "auto"},
            "data": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        _run(module)
    except ModelError as error:
        module.fail_json(msg=str(error))


def _run(module: AnsibleModule) -> None:
    config = Config.from_mapping(module.params["config"], "config")
    state = module.params["state"]
    if state == "absent":
        removed = model_state.remove(config, data=module.params["data"], check=module.check_mode)
        module.exit_json(
            changed=bool(removed),
            diff={"before": "".join(f"{what}\n" for what in removed), "after": ""},
        )
    view = model_state.look(config, tolerant=module.check_mode)
    changed = False
    if state == "started":
        again = module.params["verify"] == "full" and view.complete
        changed = view.stale or not (view.complete or view.running)
        if changed and not view.commit and not config.lock:
            module.warn(
                f"no lock is given (hf_model_lock): '{config.repo}' is taken as its source has it "
                f"at '{config.revision}', and later runs hold to '{Store(config).host_lock}'"
            )
        if (changed or again) and not module.check_mode:
            if again:
                Store(config).forget_verification()
            model_state.start(config, restart=view.stale)
            view = model_state.look(config)
    elif state == "present" and not module.check_mode:
        view = model_state.wait(config, module.params["wait"])
    wanted = f"{config.repo}@{view.commit or config.revision}\n"
    module.exit_json(
        changed=changed,
        diff={"before": "" if changed else wanted, "after": wanted},
        **view.as_dict(),
    )


if __name__ == "__main__":
    main()
