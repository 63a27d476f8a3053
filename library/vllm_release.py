#!/usr/bin/python
"""Ansible module: build a release piece by piece, or select one."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_release
short_description: Build a release of the runtime, or select one
description:
  - A release is built beside the running one under its final path and is usable only once it
    carries its completion mark.
  - The pieces C(prepared), C(installed), C(checked_out), C(patched) and C(complete) follow each
    other; they are separate so that a run shows where it is.
  - C(selected) points the link C(current) at a complete release, in one step that cannot be seen
    half done.
  - C(cleaned) removes what builds left behind that broke off.
  - C(absent) removes all releases of the host with their links, records and caches.
options:
  state:
    description: The piece to do.
    type: str
    required: true
    choices: [prepared, installed, checked_out, patched, complete, selected, cleaned, absent]
  prefix:
    description: Folder that holds C(releases/), C(current) and C(previous).
    type: path
    required: true
  fingerprint:
    description: Name of the release. For every state but C(cleaned) and C(absent).
    type: str
    default: ""
  files:
    description: For C(prepared). Content by path of what the release is built from.
    type: dict
    default: {}
  python:
    description: For C(prepared). Interpreter, a path or a version. Empty for the stack's own.
    type: str
    default: ""
  uv:
    description: Path of the uv program.
    type: str
    default: uv
  index_url:
    description: For C(installed). Index of public packages. Empty for the host's own configuration.
    type: str
    default: ""
  indexes:
    description: For C(installed). Further indexes, C(name) and C(url) each.
    type: list
    elements: dict
    default: []
  require_hashes:
    description: For C(installed). Refuse packages whose hash is not known beforehand.
    type: bool
    default: false
  sources:
    description: For C(checked_out). Checkouts, C(name), C(url) and C(commit) each.
    type: list
    elements: dict
    default: []
  cuda_home:
    description: For C(complete). Toolkit to compare with. Empty to leave that out.
    type: str
    default: ""
  keep:
    description: For C(complete). How many complete releases stay.
    type: int
    default: 2
  cache_dir:
    description: >-
      For C(complete) and C(absent). Folder with one folder of caches per release, removed with it.
    type: str
    default: ""
  remember:
    description: >-
      For C(selected). Let C(previous) name the release that was selected until now. Set to false
      when a release is put back because the selected one did not work.
    type: bool
    default: true
  timeout:
    description: Seconds that one program may take.
    type: int
    default: 10800
author: vllm-turing
"""

EXAMPLES = r"""
- name: Select a release
  vllm_release:
    state: selected
    prefix: /opt/vllm-turing
    fingerprint: 0123456789abcdef
"""

RETURN = r"""
path:
  description: Folder of the release.
  returned: always
  type: str
previous:
  description: For C(selected). Fingerprint that was selected before this call, or empty.
  returned: always
  type: str
recorded:
  description: For C(installed). Packages whose hashes were recorded for the first time.
  returned: always
  type: list
  elements: str
removed:
  description: >-
    For C(complete) and C(cleaned) the names of the releases that were removed, for C(absent) the
    paths.
  returned: always
  type: list
  elements: str
patches:
  description: For C(patched). What became of each patch.
  returned: always
  type: list
  elements: dict
details:
  description: Last lines of the program that failed.
  returned: failure
  type: list
  elements: str
"""

import json
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_turing import packages
from ansible.module_utils.vllm_turing import release as releases

ARGUMENTS: dict[str, dict[str, Any]] = {
    "state": {
        "type": "str",
        "required": True,
        "choices": [
            "prepared",
            "installed",
            "checked_out",
            "patched",
            "complete",
            "selected",
            "cleaned",
            "absent",
        ],
    },
    "prefix": {"type": "path", "required": True},
    "fingerprint": {"type": "str", "default": ""},
    "files": {"type": "dict", "default": {}},
    "python": {"type": "str", "default": ""},
    "uv": {"type": "str", "default": "uv"},
    "index_url": {"type": "str", "default": ""},
    "indexes": {"type": "list", "elements": "dict", "default": []},
    "require_hashes": {"type": "bool", "default": False},
    "sources": {"type": "list", "elements": "dict", "default": []},
    "cuda_home": {"type": "str", "default": ""},
    "keep": {"type": "int", "default": 2},
    "cache_dir": {"type": "str", "default": ""},
    "remember": {"type": "bool", "default": True},
    "timeout": {"type": "int", "default": 10800},
}


def description(prefix: Path, fingerprint: str) -> str:
    """Describe the release that is selected now, for a diff; empty for none."""
    if not fingerprint:
        return ""
    try:
        mark = releases.Release(prefix, fingerprint).mark()
    except releases.ReleaseError:
        return ""
    return text_of(mark["stack"], fingerprint, mark["versions"])


def text_of(stack: str, fingerprint: str, versions: dict[str, str]) -> str:
    """Describe a release in a few lines, for a diff."""
    lines = [f"{stack} {fingerprint}", *(f"  {name} {versions[name]}" for name in sorted(versions))]
    return "\n".join(lines) + "\n"


def cache_folder(module: AnsibleModule) -> Path | None:
    """Return the folder of the caches, where one was named."""
    return Path(module.params["cache_dir"]) if module.params["cache_dir"] else None


def remove(module: AnsibleModule) -> dict[str, Any]:
    """Remove everything that was built on this host."""
    prefix, caches = Path(module.params["prefix"]), cache_folder(module)
    found = releases.remnants(prefix, caches)
    if not module.check_mode:
        releases.remove_all(prefix, caches)
    lines = "".join(f"{path}\n" for path in found)
    return {
        "changed": bool(found),
        "removed": [str(path) for path in found],
        "diff": {"before": lines, "after": ""},
    }


def clean(module: AnsibleModule) -> dict[str, Any]:
    """Remove what builds left behind that broke off."""
    prefix = Path(module.params["prefix"])
    found = releases.unfinished(prefix)
    if not module.check_mode:
        releases.remove_unfinished(prefix)
    lines = "".join(f"{name}\n" for name in found)
    return {"changed": bool(found), "removed": found, "diff": {"before": lines, "after": ""}}


def prepare(module: AnsibleModule, builder: releases.Builder) -> dict[str, Any]:
    """Start the build; in check mode only tell what would be built."""
    release, files = builder.release, module.params["files"]
    before = description(release.prefix, releases.selected(release.prefix, "current"))
    stack = json.loads(files["stack.json"])
    after = text_of(stack["name"], release.fingerprint, stack["versions"])
    if not module.check_mode:
        builder.prepare(files, module.params["python"])
    return {"diff": {"before": before, "after": after, "before_header": "current release"}}


def patch(module: AnsibleModule, builder: releases.Builder) -> dict[str, Any]:
    """Apply the patches; the diff names each file that changes."""
    if module.check_mode and not builder.release.venv.exists():
        return {"patches": []}
    outcomes = builder.patch(check=module.check_mode)
    changed = [outcome for outcome in outcomes if outcome.changed]
    return {
        "changed": bool(changed),
        "patches": [outcome.as_dict() for outcome in outcomes],
        "diff": {
            "before": "".join(f"{outcome.name}: {outcome.before.value}\n" for outcome in changed),
            "after": "".join(f"{outcome.name}: {outcome.state.value}\n" for outcome in changed),
        },
    }


def finish(module: AnsibleModule, builder: releases.Builder) -> dict[str, Any]:
    """Write the completion mark and remove old releases."""
    if module.check_mode:
        return {}
    builder.complete(module.params["cuda_home"])
    release = builder.release
    removed = releases.prune(
        release.prefix, module.params["keep"], cache_folder(module), spare=release.fingerprint
    )
    return {"removed": removed}


def select(module: AnsibleModule, builder: releases.Builder) -> dict[str, Any]:
    """Point ``current`` at the release."""
    release = builder.release
    before = releases.selected(release.prefix, "current")
    if module.check_mode:
        changed = before != release.fingerprint
    else:
        changed = releases.select(release, remember=module.params["remember"])
    return {
        "changed": changed,
        "previous": before,
        "diff": {"before": f"{before}\n", "after": f"{release.fingerprint}\n"},
    }


def work(module: AnsibleModule, builder: releases.Builder) -> dict[str, Any]:
    """Do the piece that ``state`` names and return its part of the result."""
    state = module.params["state"]
    if state == "prepared":
        return prepare(module, builder)
    if state == "patched":
        return patch(module, builder)
    if state == "complete":
        return finish(module, builder)
    if state == "selected":
        return select(module, builder)
    if state == "cleaned":
        return clean(module)
    if state == "absent":
        return remove(module)
    if module.check_mode:
        return {}
    if state == "installed":
        return {"recorded": builder.install(require_hashes=module.params["require_hashes"])}
    builder.checkout(module.params["sources"])
    return {}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    if not module.params["fingerprint"] and module.params["state"] not in ("cleaned", "absent"):
        # An empty name would be the folder that holds all releases.
        module.fail_json(msg="fingerprint is empty; it names the release to work on")
    # The service's user reads what root builds here.
    os.umask(0o022)
    release = releases.Release(Path(module.params["prefix"]), module.params["fingerprint"])
    builder = releases.Builder(
        release=release,
        uv=module.params["uv"],
        indexes=packages.Indexes(module.params["index_url"], tuple(module.params["indexes"])),
        timeout=float(module.params["timeout"]),
    )
    result: dict[str, Any] = {
        "changed": True, "path": str(release.path), "previous": "", "recorded": [], "removed": [],
        "patches": [],
    }  # fmt: skip
    try:
        if module.check_mode or module.params["state"] == "absent":
            # Taking the lock makes its folder, which is not wanted here.
            result |= work(module, builder)
        else:
            with releases.locked(release.prefix):
                result |= work(module, builder)
    except releases.ReleaseError as error:
        module.fail_json(msg=str(error), details=error.details)
    except OSError as error:
        module.fail_json(
            msg=f"cannot write below {module.params['prefix']!r}: {error.strerror or error}"
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
