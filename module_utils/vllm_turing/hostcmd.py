"""Entry point of the programs that the systemd units run on the host, one verb each.

Every verb is a module of this package with a ``main(argv: list[str]) -> int``.
"""

from __future__ import annotations

import importlib
import sys

VERBS: dict[str, str] = {
    # verb: module of this package
    "gate": "service_gate",
    "launch": "service_launch",
    "wait-ready": "service_ready",
    "runtime-check": "runtime_check",
    "gpu-power": "gpu_power",
    "model-fetch": "model_fetch",
    "preflight": "preflight_cli",
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    :param argv: verb and its arguments; the process's own when left out
    :returns: the verb's exit status; 2 for an unknown verb
    """
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] not in VERBS:
        given = repr(args[0]) if args else "nothing"
        print(
            f"vllm-turing-host: {given} is no verb; use one of: {', '.join(VERBS)}", file=sys.stderr
        )
        return 2
    module = importlib.import_module(f".{VERBS[args[0]]}", __package__)
    return int(module.main(args[1:]))
