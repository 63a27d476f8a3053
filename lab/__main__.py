"""Command line of the lab: python -m lab up|down|status|shell|reset|reboot|mirrors|fault."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict

from lab import faults, mirrors
from lab.errors import LabError
from lab.host import Lab
from lab.state import default_state, read_json
from lab.userland.hardware import FAULTS


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    main = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    verbs = main.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        name = os.environ.get("VLLM_TURING_LAB_NAME") or "lab"
        made.add_argument("--name", default=name, help=f"name of the lab host (default: {name})")
        return made

    up = verb("up", "Build and boot the lab host; does nothing when it runs.")
    up.add_argument("--port", type=int, help="SSH port on the loopback (default: a free one)")
    down = verb("down", "Remove the lab host; the image and the package cache stay.")
    down.add_argument("--all", action="store_true", help="remove the whole state folder as well")
    status = verb("status", "Show the lab host.")
    status.add_argument("--json", action="store_true", help="as one JSON object")
    shell = verb("shell", "Open a shell on the lab host, or run a command there.")
    shell.add_argument("command", nargs=argparse.REMAINDER, help="command (default: a login shell)")
    verb("reset", "Replace the lab host by a fresh one under the same port and host key.")
    verb("reboot", "Restart the lab host.")
    mirror = verb("mirrors", "Show or change the mirror process.")
    mirror.add_argument(
        "action", nargs="?", choices=("show", "set", "hub-fault", "serve", "stop"), default="show"
    )
    mirror.add_argument(
        "settings",
        nargs="*",
        metavar="SETTING",
        help="for 'set': NAME=VALUE, such as archive=current; for 'hub-fault': a kind of fault and "
        "its options, such as 'reset where=data after=5000 times=1', or 'none'",
    )
    mirror.add_argument("--port", type=int, default=mirrors.FIRST_PORT, help=argparse.SUPPRESS)
    fault = verb("fault", "Show, list or switch a fault of the simulated hardware.")
    fault.add_argument("action", nargs="?", choices=("show", "list", "set"), default="show")
    fault.add_argument("fault", nargs="?", help="for 'set': the fault, or 'none'")
    return main


def run_mirrors(arguments: argparse.Namespace) -> int:
    """Carry out the verb 'mirrors'."""
    state = default_state()
    if arguments.action == "serve":
        mirrors.serve(state, arguments.port)
    elif arguments.action == "stop":
        print("stopped" if mirrors.stop(state) else "was not running")
    elif arguments.action == "set":
        for setting in arguments.settings or [""]:
            name, _, value = setting.partition("=")
            mirrors.set_option(state, name, value)
            print(f"{name}={value}")
    elif arguments.action == "hub-fault":
        print(mirrors.hub_fault(state, arguments.settings))
    else:
        known = read_json(state.mirror_file)
        port = int(known.get("port", 0))
        pid = mirrors.answers(port, state) if port else 0
        print(f"mirror: {mirrors.url_from_inside(port)} (process {pid})" if pid else "not running")
        settings = read_json(state.root / "mirror-settings.json")
        for name, values in mirrors.SETTINGS.items():
            print(f"  {name}={settings.get(name, values[0])}  (one of: {', '.join(values)})")
    return 0


def run_fault(arguments: argparse.Namespace) -> int:
    """Carry out the verb 'fault'."""
    if arguments.action == "list":
        width = max(map(len, FAULTS))
        for name, text in FAULTS.items():
            print(f"{name:{width}}  {text}")
        return 0
    lab = Lab(arguments.name)
    if arguments.action == "set":
        print(faults.switch(lab, arguments.fault or ""))
    else:
        print(faults.current(lab))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one verb; a LabError becomes one line on standard error and status 1."""
    arguments = parser().parse_args(argv)
    started = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    try:
        if arguments.verb == "mirrors":
            return run_mirrors(arguments)
        if arguments.verb == "fault":
            return run_fault(arguments)
        lab = Lab(arguments.name)
        if arguments.verb == "up":
            known = lab.up(progress, arguments.port)
            print(f"ssh: {' '.join(lab.ssh_command())}")
            print(f"mirror: {known['mirror']}")
        elif arguments.verb == "down":
            lab.down(progress, arguments.all)
        elif arguments.verb == "reset":
            lab.reset(progress)
        elif arguments.verb == "reboot":
            lab.reboot(progress)
        elif arguments.verb == "status":
            status = asdict(lab.status())
            if arguments.json:
                print(json.dumps(status))
            else:
                for name, value in status.items():
                    print(f"{name + ':':11} {value}")
            return 0 if status["reachable"] else 3
        elif arguments.verb == "shell":
            command = [a for a in arguments.command if a != "--"]
            argv_ssh = lab.ssh_command(*command, tty=not command)
            os.execvp(argv_ssh[0], argv_ssh)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except PermissionError as error:
        where = f"'{error.filename}' is not accessible to user id '{os.geteuid()}'"
        print(f"lab: {where}; start the lab with sudo.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
