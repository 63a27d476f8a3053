"""Software stacks as data: read one, tell what is wrong with it, and name the release it makes.

A stack is a folder ``stacks/<name>`` with ``stack.yml`` and a lock file; the patches it names lie
in ``stacks/patches``. The parser of YAML is handed in, because only the standard library may be
used here; the JSON Schema of ``stack.yml`` is ``stacks/schema.json``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Length of the part of the fingerprint that names folders: 64 bits, far beyond any collision
#: among the handful of releases of one host, and short enough to read.
NAME_LENGTH = 16
#: Keys of a stack and of a patch that are for people and decide nothing.
_PROSE = frozenset({"description", "reason", "upstream", "title"})
#: What templates in URLs may name, and the variable of the role that holds it.
MIRRORS = {
    "mirror_pytorch": "vllm_host_mirror_pytorch",
    "mirror_vllm": "vllm_host_mirror_vllm",
    "mirror_git": "vllm_host_mirror_git",
}


class StackError(Exception):
    """A stack cannot be used; the text is one sentence that says what to do."""


@dataclass(frozen=True)
class Stack:
    """One stack with the patches that were chosen for it.

    :ivar name: its folder below ``stacks``
    :ivar data: ``stack.yml``
    :ivar lock: text of the lock file
    :ivar patches: the chosen patches, ``patch.yml`` plus the key ``diff``, in the stack's order
    """

    name: str
    data: Mapping[str, Any]
    lock: str
    patches: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def toolkit(self) -> str | None:
        """Release of the CUDA toolkit it is made for; ``None`` without CUDA."""
        return str(self.data["cuda"]["toolkit"]) if self.data["cuda"] else None

    @property
    def torch_tag(self) -> str | None:
        """Local tag of the torch build it wants (``cu129``); ``None`` without CUDA."""
        return str(self.data["cuda"]["torch_tag"]) if self.data["cuda"] else None

    def fingerprint(self, python: str = "") -> str:
        """Return the 16 hexadecimal digits that name the release this stack makes.

        All that decides the content of a release goes in: the stack without its prose, the lock,
        the patches with their diffs, and an interpreter that was asked for by name. Mirrors do
        not: the same packages come from any of them.

        :param python: interpreter asked for (``vllm_runtime_python``); empty for the stack's own
        """
        content = {
            "stack": _without_prose(self.data),
            "lock": hashlib.sha256(self.lock.encode()).hexdigest(),
            "patches": [_without_prose(patch) for patch in self.patches],
            "python": python,
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:NAME_LENGTH]

    def files(self, fingerprint: str) -> dict[str, str]:
        """Return what the host needs to build the release: path below ``stack/`` to content.

        :param fingerprint: the release's name, written into ``stack.json``
        """
        content = {**self.data, "fingerprint": fingerprint}
        content["patches"] = [patch["name"] for patch in self.patches]
        files = {"stack.json": _json(content), str(self.data["lock"]["file"]): self.lock}
        for patch in self.patches:
            files[f"patches/{patch['name']}.json"] = _json(patch)
        return files

    def resolved(self, mirrors: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
        """Return ``indexes`` and ``sources`` with the mirrors put into their URLs.

        :param mirrors: ``pytorch``, ``vllm``, ``git``: base URLs
        :raises StackError: a URL names a mirror that is not given
        """
        return {
            key: [{**entry, "url": expand(str(entry["url"]), mirrors)} for entry in self.data[key]]
            for key in ("indexes", "sources")
        }


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _without_prose(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in _PROSE}


def expand(url: str, mirrors: Mapping[str, str]) -> str:
    """Put a mirror's base URL into a template such as ``{mirror_git}/weicj/FlashQLA.git``.

    :raises StackError: the mirror is unknown or empty
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        base = mirrors.get(name.removeprefix("mirror_"), "")
        if name not in MIRRORS or not base:
            variable = MIRRORS.get(name, name)
            raise StackError(f"{variable} is empty but {url!r} needs it; set it to a base URL")
        return base.rstrip("/")

    return re.sub(r"\{(\w+)\}", value, url)


def names(root: Path) -> list[str]:
    """Return the names of all stacks below ``root``."""
    return sorted(path.parent.name for path in root.glob("*/stack.yml"))


def load(
    root: Path,
    name: str,
    parse: Callable[[str], Any],
    optional_patches: Iterable[str] = (),
) -> Stack:
    """Read one stack, its lock and its patches.

    :param root: the folder ``stacks``
    :param name: the stack (``vllm_runtime_stack``)
    :param parse: reads YAML text
    :param optional_patches: patches to add (``vllm_runtime_optional_patches``)
    :raises StackError: no such stack, no such optional patch, or a file is missing
    """
    known = names(root)
    if name not in known:
        raise StackError(
            f"vllm_runtime_stack is {name!r}, which does not exist; use one of: {', '.join(known)}"
        )
    folder = root / name
    data = parse((folder / "stack.yml").read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("name") != name:
        raise StackError(f"{folder / 'stack.yml'} must be a mapping whose `name` is {name!r}")
    try:
        lock = (folder / data["lock"]["file"]).read_text(encoding="utf-8")
    except (KeyError, TypeError, OSError):
        raise StackError(
            f"stack {name!r} has no readable lock file; run `./provision lock {name}`"
        ) from None
    return Stack(name, data, lock, _patches(root / "patches", data, parse, list(optional_patches)))


def _patches(
    root: Path, data: Mapping[str, Any], parse: Callable[[str], Any], wanted: Sequence[str]
) -> tuple[Mapping[str, Any], ...]:
    allowed = list(data.get("optional_patches", []))
    for name in wanted:
        if name not in allowed:
            raise StackError(
                f"vllm_runtime_optional_patches names {name!r}, which stack {data['name']!r} does "
                f"not offer; use any of: {', '.join(allowed) or '(none)'}"
            )
    optional = [_patch(root, name, parse) for name in wanted]
    replaced = {other for patch in optional for other in patch.get("conflicts") or []}
    fixed = [_patch(root, name, parse) for name in data.get("patches", []) if name not in replaced]
    return tuple(fixed + optional)


def _patch(root: Path, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    folder = root / name
    try:
        patch = dict(parse((folder / "patch.yml").read_text(encoding="utf-8")))
        patch["diff"] = (folder / f"{name}.diff").read_text(encoding="utf-8")
    except OSError as error:
        raise StackError(f"patch {name!r} has no readable {error.filename!r}") from None
    return patch


def problems(
    stack: Stack,
    *,
    cuda_toolkit_version: str | None = None,
    python: str = "",
    require_hashes: bool = False,
) -> list[str]:
    """Tell, before any host is touched, what in the variables does not fit the stack.

    :param stack: the stack that is to be installed
    :param cuda_toolkit_version: the toolkit that the host is to get; ``None`` to leave that out
    :param python: interpreter asked for (``vllm_runtime_python``), a path or a version; or empty
    :param require_hashes: whether nothing without a hash may be installed
    :returns: one sentence each, naming the variable and the accepted values
    """
    found = [f"stack {stack.name!r}: {text}" for text in _own_problems(stack)]
    if stack.toolkit and cuda_toolkit_version and cuda_toolkit_version != stack.toolkit:
        found.append(
            f"cuda_toolkit_version is {cuda_toolkit_version!r} but vllm_runtime_stack "
            f"{stack.name!r} is built for CUDA {stack.toolkit}; set cuda_toolkit_version to "
            f"{stack.toolkit!r} or choose a stack for {cuda_toolkit_version!r}"
        )
    version = re.search(r"(\d+\.\d+)$", python)
    if version and version.group(1) not in stack.data["python"]:
        accepted = ", ".join(stack.data["python"])
        found.append(
            f"vllm_runtime_python is {python!r} but stack {stack.name!r} accepts Python {accepted}"
        )
    if require_hashes and stack.data["held"]:
        held = ", ".join(entry["name"] for entry in stack.data["held"])
        found.append(
            f"vllm_runtime_require_hashes is true but stack {stack.name!r} holds {held} by version "
            "only; set it to false, or complete the lock where their indexes can be reached"
        )
    return found


def _own_problems(stack: Stack) -> list[str]:
    """Contradictions inside the data, such as a torch build of another CUDA than the toolkit's."""
    found: list[str] = []
    tag, toolkit = stack.torch_tag, stack.toolkit
    if tag and toolkit and tag != "cu" + toolkit.replace(".", ""):
        found.append(f"torch_tag {tag!r} is another CUDA release than toolkit {toolkit!r}")
    indexes = {entry["name"] for entry in stack.data["indexes"]}
    for entry in stack.data["held"]:
        local = entry["version"].partition("+")[2]
        if local.startswith("cu") and local != tag:
            found.append(f"{entry['name']} {entry['version']} is not a {tag} build")
        if entry["index"] not in indexes:
            found.append(f"{entry['name']} is held in the unknown index {entry['index']!r}")
    locked = locked_versions(stack.lock)
    held = {entry["name"]: entry["version"] for entry in stack.data["held"]}
    for name, version in stack.data["versions"].items():
        have = held.get(name, locked.get(name))
        if have != version:
            found.append(f"{name} must be {version} but the lock has {have or 'none'}")
    for name in stack.data["forbidden"]:
        if name in locked:
            found.append(f"the lock has the forbidden package {name}")
    return found


def locked_versions(lock: str) -> dict[str, str]:
    """Return name and version of every package in the text of a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", lock, re.M))
