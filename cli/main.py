"""Read the command line and run the verb; only standard library imports until a verb runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.verbs import LAB_ACTIONS, LAB_NAME, PLAYBOOKS, VERBS, unknown

ROOT = Path(__file__).resolve().parent.parent
LAB_INVENTORY = "inventories/lab"

EPILOG = """\
Everything that is not listed above goes to ansible-playbook: -i, -e, --limit, --check, -K, -v …
--plain, or output that is not a terminal, gives Ansible's own output. The exit status is Ansible's.

  ./provision lab                          a simulated host, from nothing to a chat completion
  ./provision site -i inventories/example  the hosts of an inventory
"""


def help_text() -> str:
    """Return the help page."""
    width = max(map(len, VERBS))
    lines = ["usage: ./provision VERB [--plain] [arguments of ansible-playbook …]", "", "verbs:"]
    lines += [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    return "\n".join(lines) + "\n\n" + EPILOG


def main(argv: Sequence[str]) -> int:
    """Run one verb; return the exit status (2: the command line itself is wrong)."""
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text(), end="")
        return 0 if argv else 2
    verb, rest = argv[0], list(argv[1:])
    if verb not in VERBS:
        return fail(unknown("verb", verb, list(VERBS)) + " (./provision --help lists them)")
    if verb == "lab":
        return lab(rest)
    if verb == "test":
        return test(rest)
    if verb == "lock":
        return program([str(ROOT / "stacks/lock.py"), *rest])
    if verb == "lock-model":
        return program(["-m", "vllm_turing.model_make_lock", *rest], caller_folder())
    return playbook(verb, rest)


def fail(sentence: str) -> int:
    """Print one sentence about a wrong command line and return its exit status."""
    print(f"provision: {sentence}", file=sys.stderr)
    return 2


def parser(verb: str) -> argparse.ArgumentParser:
    """Return the parser of a verb's own options; whatever it does not know is Ansible's."""
    result = argparse.ArgumentParser(
        prog=f"./provision {verb}",
        description=VERBS[verb],
        epilog=EPILOG,
        allow_abbrev=False,  # --di must not become --diff's namesake of ours
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--plain", action="store_true", help="Ansible's own output instead of the live view"
    )
    return result


def playbook(verb: str, argv: Sequence[str]) -> int:
    """Run the playbook of a verb."""
    options = parser(verb)
    if verb == "render":
        options.add_argument(
            "--dest", required=True, metavar="DIR", help="folder that gets the files"
        )
    if verb == "preflight":
        options.add_argument("--local", action="store_true", help="check this box without Ansible")
        options.add_argument("--json", metavar="FILE", help="write the report to this file as well")
        options.add_argument("--strict", action="store_true", help="warnings count as failures")
    known, rest = options.parse_known_args(argv)
    if verb == "preflight" and known.local:
        return fail("'--local' needs no .venv: start it as ./provision preflight --local.")
    arguments = resolve_paths(rest, caller_folder())
    if verb == "render":
        arguments += extra("vllm_host_render_root", str(caller_folder() / known.dest))
    if verb == "preflight" and known.json:
        arguments += extra("preflight_json", str(caller_folder() / known.json))
    if verb == "preflight" and known.strict:
        arguments += extra("preflight_strict", True)
    return run_ansible(PLAYBOOKS[verb], arguments, plain=known.plain)


def extra(name: str, value: str | bool) -> list[str]:
    """Return a variable for Ansible's command line, as JSON: `name=value` is split at blanks."""
    return ["-e", json.dumps({name: value})]


def lab(argv: Sequence[str]) -> int:
    """Run one action on the simulated host; `up` also provisions it."""
    action = "up"
    rest = list(argv)
    if rest and not rest[0].startswith("-"):
        action = rest.pop(0)
    if action not in LAB_ACTIONS:
        return fail(unknown("action of lab", action, LAB_ACTIONS))
    if action != "up" and not any(word in ("-h", "--help") for word in rest):
        return lab_program(action, rest)
    options = parser("lab")
    options.usage = (
        f"./provision lab [{'|'.join(LAB_ACTIONS)}] [--plain] [arguments of ansible-playbook …]"
    )
    options.add_argument(
        "--name", default=os.environ.get(LAB_NAME, "lab"), help="name of the host (default: lab)"
    )
    known, rest = options.parse_known_args(rest)
    os.environ[LAB_NAME] = known.name  # inventories/lab reads it
    status = lab_program("up", ["--name", known.name])
    if status:
        return status
    name = "" if known.name == "lab" else f" --name {known.name}"
    return run_ansible(
        "site.yml",
        ["-i", LAB_INVENTORY, *rest],
        plain=known.plain,
        next_steps=[
            f"sudo ./provision lab shell{name}    look around on the host",
            f"sudo ./provision lab{name}          a second run: changed=0",
            f"sudo ./provision lab down{name}     remove it",
        ],
    )


def lab_program(action: str, arguments: Sequence[str]) -> int:
    """Run one action of the lab."""
    return program(["-m", "lab", action, *arguments])


def program(arguments: Sequence[str], folder: Path = ROOT) -> int:
    """Run a Python program of this project on our terminal; .venv's programs are on its PATH."""
    import subprocess

    from cli.ansible import environment

    variables = {**environment(ROOT), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'module_utils'}"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=variables, check=False).returncode


def test(argv: Sequence[str]) -> int:
    """Run the stages of the test command."""
    from cli import testing

    options = argparse.ArgumentParser(
        prog="./provision test", description=VERBS["test"], allow_abbrev=False
    )
    options.add_argument(
        "--only",
        metavar="STAGE[,STAGE]",
        default=",".join(testing.STAGES),
        help=f"stages to run, of: {', '.join(testing.STAGES)} (default: all)",
    )
    known = options.parse_args(argv)
    stages = [word.strip() for word in known.only.split(",") if word.strip()]
    for stage in stages:
        if stage not in testing.STAGES:
            return fail(unknown("stage", stage, list(testing.STAGES)))
    return testing.run(ROOT, stages)


def run_ansible(
    playbook_path: str, arguments: Sequence[str], *, plain: bool, next_steps: Sequence[str] = ()
) -> int:
    """Run a playbook with the live view, or replace this process by ansible-playbook."""
    from cli import ansible

    if plain or not sys.stdout.isatty() or ansible.wants_plain(arguments):
        ansible.replace_process(ROOT, playbook_path, arguments)
    from cli import live

    return live.run(ROOT, playbook_path, arguments, next_steps=next_steps)


def caller_folder() -> Path:
    """Return the folder from which ./provision was called; relative paths are meant from there."""
    return Path(os.environ.get("PROVISION_CWD", str(Path.cwd())))


def resolve_paths(arguments: Sequence[str], folder: Path) -> list[str]:
    """Make inventory paths absolute where they exist in the folder of the caller."""
    if folder == ROOT:
        return list(arguments)
    result: list[str] = []
    for word in arguments:
        after_option = bool(result) and result[-1] in ("-i", "--inventory")
        if after_option and "," not in word and (folder / word).exists():
            word = str(folder / word)
        elif word.startswith("--inventory=") and (folder / word[12:]).exists():
            word = f"--inventory={folder / word[12:]}"
        result.append(word)
    return result
