"""The ansible-playbook command, run in this checkout with its own ansible.cfg."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

PLAIN_ARGUMENTS = frozenset(
    [
        "--list-tasks",
        "--list-hosts",
        "--list-tags",
        "--syntax-check",
        "--step",
        "--version",
        "-h",
        "--help",
    ]
)
"""Arguments whose answer is Ansible's text, or which ask on the terminal: no live view for them."""

PROMPTS: dict[str, str] = {
    "-K": "BECOME password",
    "--ask-become-pass": "BECOME password",
    "-k": "SSH password",
    "--ask-pass": "SSH password",
    "-J": "Vault password",
    "--ask-vault-password": "Vault password",
    "--ask-vault-pass": "Vault password",
}
"""Arguments after which Ansible asks for a secret -> the words of its prompt."""


def wants_plain(arguments: Sequence[str]) -> bool:
    """Tell whether these arguments of ansible-playbook rule out the live view."""
    return any(word in PLAIN_ARGUMENTS for word in arguments)


def prompts(arguments: Sequence[str]) -> list[str]:
    """Return the prompts that Ansible will show for these arguments, each once."""
    return list(dict.fromkeys(PROMPTS[word] for word in arguments if word in PROMPTS))


def environment(root: Path) -> dict[str, str]:
    """Return an environment with this checkout's ansible.cfg and the programs of .venv first."""
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def replace_process(root: Path, playbook: str, arguments: Sequence[str]) -> NoReturn:
    """Become ansible-playbook: its output, its signals, its exit status."""
    program = str(Path(sys.executable).parent / "ansible-playbook")
    sys.stdout.flush()
    os.chdir(root)
    os.execve(program, [program, playbook, *arguments], environment(root))
