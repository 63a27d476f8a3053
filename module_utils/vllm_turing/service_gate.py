"""``gate``: what must be true before minutes of loading begin, with a bounded wait and a reason.

Runs as ``ExecStartPre=`` with the unit's own user, environment and sandbox. What may come late at
boot (cards, device files) or go away by itself (a port in use, memory still held) is waited for;
what cannot mend itself (a broken model folder) ends the start at once.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from . import service_model, service_settings
from .run import Runner, run
from .service_settings import Settings

#: Seconds between two looks at something that is waited for.
INTERVAL = 2.0
#: nvidia-smi initialises the driver when nothing else holds it: over a second a card.
SMI_TIMEOUT = 30.0


@dataclass(frozen=True)
class Condition:
    """One thing that must be true.

    :ivar name: a word for the log
    :ivar check: returns the reason why it is not (yet) true, or ``None``
    :ivar waits: whether time can mend it
    """

    name: str
    check: Callable[[], str | None]
    waits: bool


def conditions(settings: Settings, runner: Runner = run) -> list[Condition]:
    """Return what this service needs, cheapest and most final first."""
    wanted = [
        Condition("model", lambda: model_reason(settings.model_path), False),
        Condition("release", lambda: release_reason(settings.release_link), False),
    ]
    if settings.device_nodes:
        wanted.append(Condition("devices", lambda: nodes_reason(settings.device_nodes), True))
    if settings.gpu_count:
        wanted.append(Condition("gpus", lambda: gpus_reason(settings, runner), True))
        if settings.foreign_processes == "fail":
            wanted.append(Condition("memory", lambda: foreign_reason(runner), True))
    wanted.append(Condition("port", lambda: port_reason(settings.host, settings.port), True))
    return wanted


def wait(
    wanted: Iterable[Condition],
    timeout: float,
    *,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Check each condition, waiting for those that time can mend.

    :param timeout: seconds for all of them together
    :param say: gets a line when a wait begins
    :returns: the reasons of those that stayed untrue; empty when the start may go on
    """
    start = clock()
    failed: list[str] = []
    for condition in wanted:
        reason = condition.check()
        if reason is not None and condition.waits:
            say(f"waiting: {reason}")
        while reason is not None and condition.waits and clock() - start < timeout:
            sleep(INTERVAL)
            reason = condition.check()
        if reason is not None:
            waited = f" after {clock() - start:.0f} s" if condition.waits else ""
            failed.append(f"{condition.name}: {reason}{waited}")
    return failed


def model_reason(path: str) -> str | None:
    """Say why the model folder cannot be served."""
    found = service_model.problems(path)
    if not found:
        return None
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + more


def release_reason(link: str) -> str | None:
    """Say why the release behind the link cannot run."""
    if not (Path(link) / "release.json").is_file():
        return f"{link!r} leads to no complete release; run site.yml so that vllm_runtime builds it"
    return None


def nodes_reason(nodes: Iterable[str]) -> str | None:
    """Say which device file is missing."""
    missing = [node for node in nodes if not Path(node).exists()]
    return f"{', '.join(missing)} not there" if missing else None


def gpus_reason(settings: Settings, runner: Runner = run) -> str | None:
    """Say why the cards are not all there."""
    result = runner(
        ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"], timeout=SMI_TIMEOUT
    )
    found = {
        line.split(",")[0].strip()
        for line in result.stdout.splitlines()
        if line.startswith("GPU-") and "," in line
    }
    if not result.ok and not found:
        first = (result.stdout + result.stderr).strip().splitlines()
        words = result.error or (first[0] if first else f"exit status {result.rc}")
        return f"nvidia-smi gives no list of cards ({words})"
    missing = [uuid for uuid in settings.gpu_uuids if uuid not in found]
    if missing:
        return (
            f"{', '.join(missing)} not there; nvidia-smi lists {', '.join(sorted(found)) or 'none'}"
        )
    if len(found) < settings.gpu_count:
        return f"only {len(found)} of {settings.gpu_count} GPUs"
    return None


def foreign_reason(runner: Runner = run) -> str | None:
    """Say which process computes on the cards before we do."""
    result = runner(
        [
            "nvidia-smi",
            "--query-compute-apps=pid,used_memory,gpu_uuid",
            "--format=csv,noheader,nounits",
        ],
        timeout=SMI_TIMEOUT,
    )
    users = []
    for line in result.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdigit():
            amount = f"{cells[1]} MiB" if cells[1].isdigit() else "an unknown amount"
            users.append(
                f"pid {cells[0]} ({process_name(int(cells[0]))}) holds {amount} of {cells[2]}"
            )
    return "; ".join(users) or None


def process_name(pid: int) -> str:
    """Return a process's name and, where it runs in one, its unit."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        cgroup = Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition("/")[2]
    except OSError:
        return "not visible from here"
    return f"{name!r} in {cgroup}" if cgroup else repr(name)


def port_reason(host: str, port: int) -> str | None:
    """Say why the server could not bind its address."""
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        return f"host {host!r} cannot be resolved: {error.strerror}"
    for family, kind, protocol, _, address in infos:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                return (
                    f"port {port} on {address[0]} cannot be bound ({error.strerror}); "
                    f"see 'ss -ltnp sport = :{port}', or set vllm_service_port"
                )
    return None


def main(argv: list[str]) -> int:
    """Check what the service named by the settings file needs.

    :returns: 0 when the start may go on, 1 with the reasons on stderr otherwise
    """
    parser = argparse.ArgumentParser(prog="vllm-turing-host gate")
    parser.add_argument("--settings", required=True)
    parser.add_argument("--timeout", type=float)
    options = parser.parse_args(argv)
    try:
        settings = service_settings.load(options.settings)
    except service_settings.SettingsError as error:
        print(f"vllm-turing-host gate: {error}", file=sys.stderr)
        return 1
    timeout = settings.gate_timeout if options.timeout is None else options.timeout
    failed = wait(
        conditions(settings), timeout, say=lambda text: print(f"gate: {text}", flush=True)
    )
    if settings.gpu_count and settings.foreign_processes == "warn" and not failed:
        users = foreign_reason()
        if users:
            print(f"gate: warning: {users}", flush=True)
    for reason in failed:
        print(f"vllm-turing-host gate: {reason}", file=sys.stderr)
    if not failed:
        print(f"gate: open (user {os.getuid()}, {settings.gpu_count} GPUs, port {settings.port})")
    return 1 if failed else 0
