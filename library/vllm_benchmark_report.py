#!/usr/bin/python
"""Write the report of a benchmark."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_benchmark_report
short_description: Write the report of a benchmark
description:
  - Writes the runs of M(vllm_benchmark), their means and their comparison with a baseline as JSON
    and as Markdown. Meant for the controller.
options:
  runs:
    description: What M(vllm_benchmark) returned as C(run), in the order of measuring.
    type: list
    elements: dict
    required: true
  host:
    description: Name of the host in the report.
    type: str
    required: true
  about:
    description: What was measured (model, stack, versions), as it shall stand in the report.
    type: dict
    default: {}
  baseline:
    description: Label of a prompt to its expected figures. Empty for no comparison.
    type: dict
    default: {}
  tolerance:
    description: Share by which a figure may differ from the baseline.
    type: float
    default: 0.1
  dest:
    description: Path of the two files without their ending.
    type: path
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - vllm-turing
"""

EXAMPLES = r"""
- name: Write the report
  vllm_benchmark_report:
    runs: "{{ measured.results | map(attribute='run') }}"
    host: gpu-box
    dest: results/gpu-box/20260714-101500
  delegate_to: localhost
"""

RETURN = r"""
paths:
  description: The files that were written.
  type: list
  elements: str
  returned: success
means:
  description: Label of a prompt to the mean of each figure over the runs that count.
  type: dict
  returned: success
misses:
  description: One sentence for each figure outside the baseline's band.
  type: list
  elements: str
  returned: success
failures:
  description: One sentence for each different error of a run.
  type: list
  elements: str
  returned: success
report:
  description: The same for the launcher's closing report.
  type: dict
  returned: success
"""

import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import benchmark_report


def main() -> None:
    """Read the arguments, write two files."""
    module = AnsibleModule(
        argument_spec={
            "runs": {"type": "list", "elements": "dict", "required": True},
            "host": {"type": "str", "required": True},
            "about": {"type": "dict", "default": {}},
            "baseline": {"type": "dict", "default": {}},
            "tolerance": {"type": "float", "default": 0.1},
            "dest": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    options = module.params
    means = benchmark_report.summary(options["runs"])
    rows = benchmark_report.comparison(means, options["baseline"], options["tolerance"])
    result = {
        "schema_version": 1,
        "host": options["host"],
        "about": options["about"],
        "runs": options["runs"],
        "means": means,
        "comparison": rows,
    }
    paths = {
        f"{options['dest']}.json": json.dumps(result, indent=1) + "\n",
        f"{options['dest']}.md": benchmark_report.markdown(result),
    }
    if not module.check_mode:
        try:
            Path(options["dest"]).parent.mkdir(parents=True, exist_ok=True)
            for path, text in paths.items():
                Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            module.fail_json(msg=f"cannot write '{error.filename}': {error.strerror}.")
    module.exit_json(
        changed=True,
        paths=list(paths),
        means=means,
        misses=benchmark_report.misses(rows),
        failures=benchmark_report.failures(options["runs"]),
        report={
            "host": options["host"],
            "changed": [f"wrote {path}" for path in paths],
            "tables": [benchmark_report.means_table(means)],
        },
    )


if __name__ == "__main__":
    main()
