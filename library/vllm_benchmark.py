#!/usr/bin/python
"""Measure one request to a vLLM server from the host it runs on."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_benchmark
short_description: Measure one request to a vLLM server
description:
  - Draws a fresh random prompt of a given number of tokens, sends it to the server as a streamed
    chat completion and returns time to first token, prefill and decode rate, the share of accepted
    draft tokens and how many prompt tokens came from the prefix cache.
  - A run that breaks off, or cannot be made at all, is returned with C(error) and does not fail the
    task, so that the other runs and the report are kept.
  - Changes nothing on the host. Nothing is measured in check mode.
options:
  url:
    description: Address of the server as seen from the host.
    type: str
    required: true
  model:
    description: The name under which the model is served.
    type: str
    required: true
  key_file:
    description: File on the host with the server's key. Empty where none is needed.
    type: path
    default: ""
  label:
    description: Name of the prompt in the report.
    type: str
    required: true
  tokens:
    description: Length of the prompt in tokens of the model's own tokenizer.
    type: int
    required: true
  max_tokens:
    description: Most tokens that are generated.
    type: int
    required: true
  warmup:
    description: Mark the run as a warm-up, which is shown and not counted.
    type: bool
    default: false
  timeout:
    description: Longest silence of the server in seconds, which includes a whole prefill.
    type: int
    default: 900
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - vllm-turing
"""

EXAMPLES = r"""
- name: Measure a prompt of 17,045 tokens
  vllm_benchmark:
    url: http://127.0.0.1:8000
    model: qwen-local
    key_file: /etc/vllm-turing/api-key
    label: 20K
    tokens: 17045
    max_tokens: 256
"""

RETURN = r"""
run:
  description: >-
    The figures of the run - C(label), C(warmup), C(asked_tokens), C(prompt_tokens),
    C(completion_tokens), C(ttft_s), C(total_s), C(prefill_tok_s), C(decode_tok_s), C(acceptance),
    C(cached_tokens), C(events), C(client_ms_per_event), C(finish_reason), C(error), C(warning).
    A figure that could not be known is null.
  type: dict
  returned: success
progress:
  description: The run in one line.
  type: str
  returned: success
"""

import random
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import benchmark_client, benchmark_prompts, benchmark_report


def main() -> None:
    """Read the arguments, measure once, return the figures."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "key_file": {"type": "path", "default": "", "no_log": False},
            "label": {"type": "str", "required": True},
            "tokens": {"type": "int", "required": True},
            "max_tokens": {"type": "int", "required": True},
            "warmup": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 900},
        },
        supports_check_mode=True,
    )
    options = module.params
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, msg="nothing is measured in check mode")
    key = None
    if options["key_file"]:
        try:
            key = Path(options["key_file"]).read_text(encoding="utf-8").strip()
        except OSError as error:
            module.fail_json(msg=f"the key file '{options['key_file']}': {error.strerror}.")
    server = benchmark_client.Server(options["url"], options["model"], key, options["timeout"])
    run = {
        "label": options["label"],
        "warmup": options["warmup"],
        "asked_tokens": options["tokens"],
    }
    try:
        run.update(measure(server, options["tokens"], options["max_tokens"]))
    except (benchmark_client.BenchmarkError, benchmark_prompts.LengthError) as error:
        run["error"] = str(error)
    module.exit_json(changed=False, run=run, progress=benchmark_report.progress(run))


def measure(server: benchmark_client.Server, tokens: int, max_tokens: int) -> dict[str, Any]:
    """Draw a prompt, measure it once and return the figures."""
    prompt, limit = draw(server, tokens)
    if limit is not None and tokens + max_tokens > limit:
        raise benchmark_client.BenchmarkError(
            f"{tokens} + {max_tokens} tokens do not fit into the server's max-model-len '{limit}'."
        )
    return benchmark_client.measure(server, prompt, max_tokens).as_dict()


def draw(server: benchmark_client.Server, tokens: int) -> tuple[str, int | None]:
    """Return a random prompt of so many tokens and the server's longest context."""
    limit: list[int | None] = [None]

    def count(text: str) -> int:
        found, limit[0] = benchmark_client.count_tokens(server, text)
        return found

    prompt, _ = benchmark_prompts.steer(tokens, count, random.SystemRandom())
    return prompt, limit[0]


if __name__ == "__main__":
    main()
