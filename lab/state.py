"""Where the lab keeps things: one folder on the controller."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.errors import LabError

DEFAULT_DIR = "/var/cache/vllm-turing-lab"
# slirp4netns presents the controller's loopback under this address inside the container.
CONTROLLER_FROM_INSIDE = "10.0.2.2"
NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


@dataclass(frozen=True)
class State:
    """The folders and files below the state directory `root`."""

    root: Path

    @property
    def images(self) -> Path:
        """Box images, one folder a digest."""
        return self.root / "images"

    @property
    def store(self) -> Path:
        """The one folder that is mounted into every host, at the same path."""
        return self.root / "store"

    @property
    def ssh(self) -> Path:
        """Client key and known_hosts."""
        return self.root / "ssh"

    @property
    def apt(self) -> Path:
        """The signed package archives, one folder a digest, and the link 'current'."""
        return self.root / "apt"

    @property
    def keys(self) -> Path:
        """GnuPG home of the archive keys."""
        return self.root / "keys"

    @property
    def mirror_file(self) -> Path:
        """Port and process id of the mirror process."""
        return self.root / "mirror.json"

    @property
    def mirror_log(self) -> Path:
        """Requests and errors of the mirror process."""
        return self.root / "mirror.log"

    @property
    def inventory_file(self) -> Path:
        """Facts for inventories/lab: every host's connection and the mirror's addresses."""
        return self.root / "inventory.json"

    def host(self, name: str) -> Path:
        """Folder of one lab host."""
        if not NAME.fullmatch(name):
            raise LabError(
                f"The lab name '{name}' is not usable; use lower-case letters, digits and '-'."
            )
        return self.root / "hosts" / name

    def host_store(self, name: str) -> Path:
        """Return the folder of a host inside the shared store."""
        return self.store / "hosts" / name

    def host_names(self) -> list[str]:
        """Names of the hosts that exist on disk."""
        folder = self.root / "hosts"
        if not folder.is_dir():
            return []
        return sorted(p.name for p in folder.iterdir() if (p / "connection.json").is_file())


def default_state() -> State:
    """Return the state directory the environment asks for, else the default."""
    return State(Path(os.environ.get("VLLM_TURING_LAB_DIR") or DEFAULT_DIR).resolve())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing or damaged file reads as empty."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON object in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    draft.replace(path)
