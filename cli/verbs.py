"""What each verb needs before it can start. Standard library only: read before .venv exists."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

VERBS: dict[str, str] = {
    "lab": "a simulated host: up (default), down [--all], shell, status, reset, reboot, fault, …",
    "site": "provision the hosts of an inventory (default: this box)",
    "preflight": "check hosts and change nothing; --local checks this box without Ansible",
    "upgrade": "move hosts to another driver, CUDA or stack version, one step at a time",
    "rollback": "put the previous release back",
    "verify": "compare what runs on the hosts with what should run",
    "benchmark": "measure time to first token, prefill and decode on the hosts",
    "render": "write every file that would be installed to a folder; touches no host",
    "plan": "does a model with this context fit the cards? needs no host",
    "lock": "show or make the lock file of a stack",
    "lock-model": "write a model's file list with digests, to pin it",
    "test": "lint, unit tests and the lab scenario",
}
"""Verb -> one line for the help page."""

PLAYBOOKS: dict[str, str] = {
    "site": "site.yml",
    "preflight": "playbooks/preflight.yml",
    "upgrade": "playbooks/upgrade.yml",
    "rollback": "playbooks/rollback.yml",
    "verify": "playbooks/verify.yml",
    "benchmark": "playbooks/benchmark.yml",
    "render": "playbooks/render.yml",
}
"""Verb -> the playbook that it runs; the same one that ansible-playbook takes."""

LAB_NAME = "VLLM_TURING_LAB_NAME"
"""The variable by which inventories/lab and the lab agree on a host."""

LAB_ACTIONS = ("up", "down", "shell", "status", "reset", "reboot", "mirrors", "fault")

RUN_REQUIREMENTS = "requirements.txt"
DEV_REQUIREMENTS = "requirements-dev.txt"
DEV_VERBS = ("test", "lock", "lock-model")


@dataclass(frozen=True)
class Request:
    """What the launcher has to know about a command line."""

    verb: str | None
    requirements: str
    standalone: tuple[str, ...] = ()
    """Module and arguments for the system's own Python when no .venv is needed."""
    wants_lab: bool = False
    """Whether the simulated host will be started: that needs root."""


def look_at(argv: Sequence[str]) -> Request:
    """Read the verb of a command line and say what it needs; never fails on a wrong one."""
    verb = argv[0] if argv else None
    if verb == "plan":
        return Request(verb, RUN_REQUIREMENTS, ("vllm_turing.kv_plan", *argv[1:]))
    if verb not in VERBS or any(word in ("-h", "--help") for word in argv[1:]):
        return Request(None, RUN_REQUIREMENTS, ("cli", *argv))
    if verb == "preflight" and "--local" in argv:
        rest = tuple(word for word in argv[1:] if word != "--local")
        return Request(verb, RUN_REQUIREMENTS, ("vllm_turing.preflight_cli", *rest))
    return Request(
        verb,
        DEV_REQUIREMENTS if verb in DEV_VERBS else RUN_REQUIREMENTS,
        wants_lab=verb == "lab" or (verb == "test" and _wants_lab(argv[1:])),
    )


def root_problem(request: Request, euid: int) -> str | None:
    """Return the sentence for a verb that cannot work as this user, else None."""
    if not request.wants_lab or euid == 0:
        return None
    if request.verb == "lab":
        return (
            "'lab' boots a simulated host and needs root: run sudo ./provision lab "
            "(./provision site works without root)."
        )
    return (
        "the stage 'molecule' boots a simulated host and needs root: run sudo ./provision test, "
        "or leave it out with --only lint,unit."
    )


def _wants_lab(arguments: Sequence[str]) -> bool:
    """Tell whether the test command's arguments let the stage `molecule` run."""
    for place, word in enumerate(arguments):
        if word.startswith("--only="):
            return "molecule" in word
        if word == "--only" and place + 1 < len(arguments):
            return "molecule" in arguments[place + 1]
    return True


def unknown(kind: str, word: str, known: Sequence[str]) -> str:
    """Return one sentence for a word that is not known, with the nearest one that is."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(known)}."
    return f"unknown {kind} '{word}'; {hint}"
