"""What the programs behind the unit need to know: one JSON file that the role writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


class SettingsError(Exception):
    """A settings file that cannot be used, in one sentence."""


@dataclass(frozen=True)
class Settings:
    """One service, as its programs see it.

    :ivar name: name of the unit without ``.service``
    :ivar host: address that the server binds; ``connect_host`` is where it is asked
    :ivar release_link: link to the release that runs (``…/current``)
    :ivar cache_dir: folder of the JIT caches, one subfolder a release fingerprint
    :ivar config: vLLM's configuration file
    :ivar model_path: folder of the model
    :ivar api_key: whether a key is asked for
    :ivar gpu_count: cards that must be there; 0 for an engine that needs none
    :ivar gpu_uuids: cards that must be there by name; empty for "any ``gpu_count``"
    :ivar device_nodes: device files that must exist
    :ivar foreign_processes: ``fail``, ``warn`` or ``ignore`` when others compute on the cards
    :ivar gate_timeout: seconds that the gate waits for what may come late
    :ivar ready_timeout: seconds that loading and compiling may take
    :ivar environment_names: variables of the unit whose values belong to the applied state
    :ivar log_file: where the service logs; empty for the journal
    """

    name: str
    host: str
    port: int
    model_name: str
    release_link: str
    cache_dir: str
    config: str
    model_path: str
    api_key: bool = True
    gpu_count: int = 2
    gpu_uuids: tuple[str, ...] = ()
    device_nodes: tuple[str, ...] = ()
    foreign_processes: str = "fail"
    gate_timeout: int = 120
    ready_timeout: int = 1800
    environment_names: tuple[str, ...] = ()
    log_file: str = ""

    @property
    def connect_host(self) -> str:
        """Where to ask a server that binds ``host``."""
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        """The server's base address, without a slash at the end."""
        host = self.connect_host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def run_dir(self) -> Path:
        """The unit's ``RuntimeDirectory=``; it lives as long as the service runs."""
        return Path("/run") / self.name

    @property
    def applied(self) -> Path:
        """Where the launcher records what it started."""
        return self.run_dir / "applied.json"


def from_mapping(data: Mapping[str, Any]) -> Settings:
    """Build settings from decoded JSON.

    :raises SettingsError: for a missing, unknown or wrongly typed key
    """
    known = {item.name: item for item in fields(Settings)}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise SettingsError(f"{unknown[0]!r} is no setting of the service")
    values: dict[str, Any] = {}
    for name, item in known.items():
        if name not in data:
            continue
        value = data[name]
        kind = str(item.type)
        if kind.startswith("tuple"):
            if not isinstance(value, list):
                raise SettingsError(f"{name!r} is {value!r}; it must be a list")
            value = tuple(str(entry) for entry in value)
        elif kind == "bool" and not isinstance(value, bool):
            raise SettingsError(f"{name!r} is {value!r}; it must be true or false")
        elif kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            raise SettingsError(f"{name!r} is {value!r}; it must be a whole number")
        elif kind == "str" and not isinstance(value, str):
            raise SettingsError(f"{name!r} is {value!r}; it must be a text")
        values[name] = value
    try:
        return Settings(**values)
    except TypeError as error:
        missing = str(error).rpartition(":")[2].strip()
        raise SettingsError(f"settings of the service are missing: {missing}") from error


def load(path: str | Path) -> Settings:
    """Read the settings file.

    :raises SettingsError: when it cannot be read or is not what the role writes
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; run site.yml again") from error
    except ValueError as error:
        raise SettingsError(f"{path}: not JSON ({error}); run site.yml again") from error
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: holds {type(data).__name__}, not a mapping")
    try:
        return from_mapping(data)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def cache_environment(
    cache_dir: str, fingerprint: str, caches: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that give one release its own caches of compiled code.

    :param cache_dir: the folder of all caches
    :param fingerprint: the release's; it names the folder, so that a kernel built for another
        release can never be loaded
    :param caches: folder to variable, as the stack lists them
    """
    return {variable: f"{cache_dir}/{fingerprint}/{folder}" for folder, variable in caches.items()}
