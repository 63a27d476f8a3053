"""Find the systemd units of a host that run vLLM, and read them as systemd would."""

from __future__ import annotations

import re

from . import systemd_unit
from .preflight_check import Unit
from .preflight_host import Host
from .preflight_wish import Wish

_FOLDERS = ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/lib/systemd/system")
_RUNS_VLLM = re.compile(r"vllm\.entrypoints|\bvllm\s+serve\b|/vllm-turing-host\b.*\blaunch\b")
_OURS = re.compile(r"/vllm-turing-host\b")


def find_units(host: Host, wish: Wish) -> list[Unit]:
    """Return every unit whose command starts vLLM, drop-ins applied; never raises."""
    folders = dict.fromkeys((wish.text("vllm_host_unit_dir"), *_FOLDERS))
    units: dict[str, Unit] = {}
    for folder in folders:
        for path in host.glob(folder, "*.service"):
            name = path.rsplit("/", 1)[-1]
            if name in units or host.resolve(path) == "/dev/null":
                continue
            text = host.read(path)
            if text is not None and _RUNS_VLLM.search(text.replace("\\\n", " ")):
                units[name] = _read(host, wish, name, path, text)
    return list(units.values())


def _read(host: Host, wish: Wish, name: str, path: str, text: str) -> Unit:
    files = [path]
    for folder in dict.fromkeys((wish.text("vllm_host_unit_dir"), *_FOLDERS)):
        files += host.glob(f"{folder}/{name}.d", "*.conf")
    settings: systemd_unit.Unit = {}
    environment: dict[str, str] = {}
    origin: dict[str, str] = {}
    broken = ""
    for file in files:
        content = text if file == path else host.read(file) or ""
        try:
            parsed = systemd_unit.parse(content)
            found = systemd_unit.environment(parsed)
        except systemd_unit.UnitError as error:
            broken = broken or f"{file}: {error}"
            continue
        for section, pairs in parsed.items():
            settings.setdefault(section, []).extend(pairs)
        for key, value in found.items():
            environment[key], origin[key] = value, f"{file}:{_line_of(content, key)}"
    for file in systemd_unit.values(settings, "Service", "EnvironmentFile"):
        file = file.removeprefix("-")
        for number, line in enumerate((host.read(file) or "").splitlines(), 1):
            key, mark, value = line.strip().partition("=")
            if mark and re.fullmatch(r"[A-Za-z_]\w*", key):
                environment[key] = value.strip().strip("\"'")
                origin[key] = f"{file}:{number}"
    argv: list[str] = []
    try:
        commands = systemd_unit.values(settings, "Service", "ExecStart")
        argv = systemd_unit.split(commands[-1]) if commands else []
    except systemd_unit.UnitError as error:
        broken = broken or f"{path}: {error}"
    ours = bool(argv) and _OURS.search(" ".join(argv)) is not None
    return Unit(
        name, tuple(files), settings, environment, origin, tuple(argv), ours, broken
    )  # fmt: skip


def _line_of(text: str, key: str) -> int:
    """Return the line that sets a variable."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("Environment") and f"{key}=" in line:
            return number
    return 1


def interpreter(unit: Unit) -> str:
    """Return the Python that a unit's command runs; empty when it is none."""
    first = unit.argv[0].lstrip("@-:+!") if unit.argv else ""
    return first if re.search(r"/python[\d.]*$", first) else ""


def venv(unit: Unit) -> str:
    """Return the virtual environment that a unit's command runs in; empty when it is none."""
    first = unit.argv[0].lstrip("@-:+!") if unit.argv else ""
    folder, _, name = first.rpartition("/bin/")
    return folder if name and folder.startswith("/") and folder != "/usr" else ""
