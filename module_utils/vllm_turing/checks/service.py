"""Checks of what runs, or would run, as the service: port, processes, shared memory, units."""

from __future__ import annotations

import json
import re

from ..nvidia_smi import SmiProcess
from ..preflight_check import (
    Context,
    Outcome,
    Unit,
    check,
    failed,
    gib,
    listing,
    passed,
    skipped,
    warned,
)

_JSON_OPTIONS = (
    "reasoning-config",
    "default-chat-template-kwargs",
    "additional-config",
    "speculative-config",
    "compilation-config",
    "override-generation-config",
)


def unit_of(context: Context, pid: int) -> str:
    """Return the systemd unit that a process belongs to; its whole cgroup when it is in none."""
    text = context.host.read(f"/proc/{pid}/cgroup") or ""
    match = re.search(r"/([^/\n]+\.service)(?:/|$)", text, re.MULTILINE)
    return match.group(1) if match else text.strip().rpartition(":")[2]


def owner_of(context: Context, pid: int) -> str:
    """Return the name of the account that a process runs as; empty when it is unknown."""
    status = context.host.read(f"/proc/{pid}/status") or ""
    match = re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)
    if not match:
        return ""
    uid = int(match.group(1))
    names = [name for name, (number, _, _) in context.accounts.items() if number == uid]
    return names[0] if names else f"uid {uid}"


def _own_units(context: Context) -> set[str]:
    name = context.wish.text("vllm_service_name")
    return {f"{name}.service", *(unit.name for unit in context.units)}


@check("service", "service_port")
def service_port(context: Context) -> Outcome:
    """Check that nothing else listens on the service's port."""
    host, port = context.host, context.wish.whole("vllm_service_port")
    tables = [host.read(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    if all(table is None for table in tables):
        return skipped("/proc/net/tcp cannot be read")
    inodes = set()
    for table in tables:
        for line in (table or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != "0A":
                continue
            if fields[1].rpartition(":")[2].upper() == f"{port:04X}":
                inodes.add(fields[9])
    if not inodes:
        return passed(f"port {port} is free")
    pid = _holder(context, inodes)
    if pid is None:
        return failed(
            f"port {port} is taken, by whom cannot be seen"
            + ("" if host.uid == 0 else " (not root)"),
            "/proc/net/tcp",
            f"ss -ltnp 'sport = :{port}'; or set vllm_service_port",
        )
    unit, name = unit_of(context, pid), (host.read(f"/proc/{pid}/comm") or "").strip()
    wanted = f"{context.wish.text('vllm_service_name')}.service"
    if unit == wanted or any(u.ours and u.name == unit for u in context.units):
        return passed(f"port {port} is the service's own ({unit})")
    stop = f"systemctl disable --now {unit}" if unit.endswith(".service") else f"end pid {pid}"
    return failed(
        f"port {port} is taken by '{name}' (pid {pid}, {unit or 'no unit'})",
        "/proc/net/tcp",
        f"{stop}; or set vllm_service_port",
    )


def _holder(context: Context, inodes: set[str]) -> int | None:
    """Return the process that holds one of the sockets."""
    host = context.host
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for name in host.listdir("/proc"):
        if name.isdecimal():
            for entry in host.listdir(f"/proc/{name}/fd"):
                if host.link_target(f"/proc/{name}/fd/{entry}") in wanted:
                    return int(name)
    return None


@check("service", "gpu_processes")
def gpu_processes(context: Context) -> Outcome:
    """Check that no process outside the service holds memory of the cards."""
    facts = context.gpus
    if not facts.gpus:
        return skipped("seen once the driver runs")
    own, foreign, unknown = _own_units(context), [], []
    killable: list[int] = []
    for gpu in facts.gpus:
        if gpu.index not in context.wish.device_ids:
            continue
        for process in gpu.processes:
            if process.kind == "G":
                continue
            if process.pid is None or not context.host.exists(f"/proc/{process.pid}"):
                unknown.append(f"{process.name or 'hidden'} on GPU {gpu.index}")
                continue
            unit = unit_of(context, process.pid)
            if unit in own:
                continue
            who = owner_of(context, process.pid)
            foreign.append(
                f"pid {process.pid} '{_name(context, process)}' of {who or 'unknown'} "
                f"({unit or 'no unit'}), {process.memory or '?'} MiB on GPU {gpu.index}"
            )
            if _is_orphan(context, process, who):
                killable.append(process.pid)
    if foreign:
        fix = (
            f"kill {' '.join(map(str, dict.fromkeys(killable)))} (workers of a service that is "
            "gone); wait 20 s for their memory"
            if killable
            else "they belong to somebody else: ask, or choose other cards"
        )
        return failed(f"the cards are in use: {listing(foreign)}", "nvidia-smi -q", fix)
    if unknown:
        return warned(
            f"processes that cannot be seen: {listing(unknown)}",
            "nvidia-smi -q" + ("" if context.host.uid == 0 else " (not root)"),
            "look with sudo nvidia-smi",
        )
    return passed("none")


def _name(context: Context, process: SmiProcess) -> str:
    return (context.host.read(f"/proc/{process.pid}/comm") or process.name).strip()


def _is_orphan(context: Context, process: SmiProcess, who: str) -> bool:
    users = {context.wish.text("vllm_host_user")} | {
        unit.value("Service", "User") for unit in context.units
    }
    return who in users and "vllm" in _name(context, process).lower()


@check("service", "shared_memory")
def shared_memory(context: Context) -> Outcome:
    """Check that shared memory has room and no remains of dead processes."""
    host = context.host
    disk = host.disk("/dev/shm")
    if disk is None or not host.is_dir("/dev/shm"):
        return skipped("/dev/shm cannot be read")
    names = [name for name in host.listdir("/dev/shm") if re.match(r"(nccl-|psm_|sem\.mp-)", name)]
    size = sum(host.size(f"/dev/shm/{name}") or 0 for name in names)
    running = [
        unit.name
        for unit in context.units
        if host.run(("systemctl", "is-active", unit.name)).stdout.strip()
        in ("active", "activating")
    ]
    used = f"{gib(disk.total - disk.free)} of {gib(disk.total)} used"
    if names and not running:
        status = failed if disk.total and disk.free < disk.total * 0.05 else warned
        return status(
            f"{len(names)} segments of dead processes take {gib(size)} ({used})",
            listing([f"/dev/shm/{name}" for name in names]),
            "rm /dev/shm/nccl-* /dev/shm/psm_* while no service runs",
            mended_by="vllm_service",
        )
    if disk.total and disk.free < disk.total * 0.05:
        return failed(f"/dev/shm is full: {used}", "/dev/shm", "see who fills it: ls -l /dev/shm")
    return passed(used)


# -- units of hand-made services -------------------------------------------------------------------


def _mended(unit: Unit) -> str:
    return "vllm_service" if unit.ours else ""


@check("service", "handmade_service")
def handmade_service(context: Context) -> Outcome:
    """Check that a service installed by hand is recognised."""
    units = context.foreign_units
    if not units:
        return skipped("no vLLM service installed by hand")
    wanted = f"{context.wish.text('vllm_service_name')}.service"
    seen = [
        f"{unit.name}: model '{unit.option('model') or '?'}', port {unit.option('port') or '8000'}"
        for unit in units
    ]
    if all(unit.name == wanted for unit in units):
        return passed(f"site.yml takes over {listing(seen)}", units[0].files[0])
    others = [unit.name for unit in units if unit.name != wanted]
    return warned(
        f"a vLLM service was installed by hand: {listing(seen)}",
        listing([unit.files[0] for unit in units]),
        f"to take it over set vllm_service_name: {others[0].removesuffix('.service')} (and its "
        "paths, as inventories/reference does); to replace it: systemctl disable --now "
        + " ".join(others),
    )


@check("service", "unit_restart")
def unit_restart(context: Context) -> Outcome:
    """Check that a unit that keeps failing stops restarting, and knows when it is ready."""
    if not context.units:
        return skipped("no vLLM unit yet")
    for unit in context.units:
        misplaced = [
            key
            for key in ("StartLimitIntervalSec", "StartLimitBurst", "StartLimitInterval")
            if unit.value("Service", key)
        ]
        if misplaced and "StartLimitIntervalSec" in misplaced:
            return failed(
                f"{unit.name}: StartLimitIntervalSec= in [Service] is ignored by systemd",
                unit.files[0],
                "move it to [Unit]",
                _mended(unit),
            )
        restart = unit.value("Service", "Restart")
        interval = unit.value("Unit", "StartLimitIntervalSec")
        if restart in ("always", "on-failure") and not interval:
            pause = unit.value("Service", "RestartSec") or "100ms"
            number = re.fullmatch(r"(\d+)s?", pause)
            endless = number is not None and int(number.group(1)) * 5 >= 10
            text = (
                "the default limit (5 starts in 10 s) can never trip: a crash loops for ever"
                if endless
                else "the default limit (5 starts in 10 s) trips at once and stays tripped"
            )
            return warned(
                f"{unit.name}: Restart={restart} with RestartSec={pause} and no "
                f"StartLimitIntervalSec: {text}",
                unit.files[0],
                "set StartLimitIntervalSec and StartLimitBurst in [Unit], sized to the load time",
                _mended(unit),
            )
    return passed(listing([unit.name for unit in context.units]))


@check("service", "unit_order")
def unit_order(context: Context) -> Outcome:
    """Check that a unit waits for the cards, and a start means that it answers."""
    if not context.units:
        return skipped("no vLLM unit yet")
    for unit in context.units:
        after = " ".join(v for key, v in unit.settings.get("Unit", []) if key == "After")
        kind = unit.value("Service", "Type") or "simple"
        if "nvidia-persistenced.service" not in after and not unit.ours:
            return warned(
                f"{unit.name} does not start after nvidia-persistenced: at boot it may find no "
                f"card; Type={kind} counts as started before the model is loaded",
                unit.files[0],
                "add After= and Wants=nvidia-persistenced.service, and wait for /health",
                _mended(unit),
            )
    return passed(listing([unit.name for unit in context.units]))


@check("service", "unit_json")
def unit_json(context: Context) -> Outcome:
    """Check that JSON arguments of a unit reach vLLM as JSON."""
    if not context.units:
        return skipped("no vLLM unit yet")
    count = 0
    for unit in context.units:
        if unit.broken:
            return failed(
                f"{unit.name} cannot be read as systemd does: {unit.broken}",
                unit.files[0],
                f"systemd-analyze verify {unit.files[0]}",
                _mended(unit),
            )
        for name in _JSON_OPTIONS:
            value = unit.option(name)
            if value is None:
                continue
            count += 1
            try:
                json.loads(value)
            except ValueError:
                return failed(
                    f"{unit.name}: --{name} reaches vLLM as '{value}', which is no JSON",
                    unit.files[0],
                    f'write it in single quotes: --{name} \'{{"key":"value"}}\'',
                    _mended(unit),
                )
    return passed(f"{count} JSON arguments" if count else "no JSON argument on the command line")


@check("service", "unit_paths")
def unit_paths(context: Context) -> Outcome:
    """Check that blanks in a unit's paths and variables are quoted."""
    if not context.units:
        return skipped("no vLLM unit yet")
    for unit in context.units:
        for file in unit.files:
            for number, line in enumerate((context.host.read(file) or "").splitlines(), 1):
                match = re.match(r"\s*Environment=(?![\"'])\w+=(\S*)\s+(\S.*)$", line)
                if match and not re.match(r"\w+=", match.group(2)):
                    return failed(
                        f"{unit.name}: '{match.group(2)}' is cut off from its variable at a blank",
                        f"{file}:{number}",
                        'quote the whole assignment: Environment="NAME=value with blanks"',
                        _mended(unit),
                    )
        folder = unit.option("model") or ""
        if folder.startswith("/") and not context.host.exists(folder):
            return warned(
                f"{unit.name}: the model folder '{folder}' is not there",
                unit.files[0],
                "run site.yml --tags model, or mend --model",
                _mended(unit),
            )
    return passed(listing([unit.name for unit in context.units]))


@check("service", "unit_log")
def unit_log(context: Context) -> Outcome:
    """Check that a unit's log cannot fill the disk."""
    if not context.units:
        return skipped("no vLLM unit yet")
    host = context.host
    rotated = "\n".join(
        host.read(file) or "" for file in host.glob("/etc/logrotate.d", "*")
    )  # names of rotated files
    for unit in context.units:
        for key in ("StandardOutput", "StandardError"):
            target = unit.value("Service", key)
            if not target.startswith(("append:", "file:")):
                continue
            file = target.partition(":")[2]
            if file in rotated or re.search(
                rf"{re.escape(file.rsplit('/', 1)[0])}/\*", rotated
            ):  # fmt: skip
                continue
            size = host.size(file) or 0
            return warned(
                f"{unit.name} writes to '{file}' ({gib(size)} so far), which nothing rotates",
                f"{key}={target}",
                "log to the journal, or rotate the file with copytruncate in /etc/logrotate.d",
                _mended(unit),
            )
    return passed(listing([unit.name for unit in context.units]))


@check("service", "unit_exposure")
def unit_exposure(context: Context) -> Outcome:
    """Check that a service that is open to the network asks for a key."""
    if not context.units:
        return skipped("no vLLM unit yet")
    for unit in context.units:
        address = unit.option("host")
        if unit.ours or address is None or address in ("127.0.0.1", "localhost", "::1"):
            continue
        if unit.option("api-key") is None and "VLLM_API_KEY" not in unit.environment:
            return warned(
                f"{unit.name} listens on {address} and asks for no key: everybody in the network "
                "can use it",
                unit.files[0],
                "listen on 127.0.0.1, or set VLLM_API_KEY",
            )
    return passed(listing([unit.name for unit in context.units]))
