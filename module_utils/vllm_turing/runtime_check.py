"""``runtime-check``: whether the release that is about to start is the one that was built.

Runs before every start of the service, with the unit's own environment and working folder, so that
it sees the interpreter, the import path and the compilers that the engine will see. It imports
nothing of the engine and takes well under a second. Every failure is one line with what to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from . import coherence, distributions, jit_cache, release
from .run import Runner, run

#: What mends nearly everything here.
MEND = "run: ansible-playbook site.yml --tags runtime,service"
#: Packages that must come from the release and from nowhere else.
_IMPORTED = ("torch", "vllm", "flashinfer", "triton")
_ASK = (
    "import json, sys, sysconfig; print(json.dumps({'version': sys.version.split()[0],"
    " 'path': sys.path, 'include': sysconfig.get_path('include')}))"
)


@dataclass(frozen=True)
class Interpreter:
    """What the unit's interpreter says of itself.

    :ivar version: ``3.12.3``
    :ivar path: where it imports from, in order
    :ivar include: folder of its C headers
    """

    version: str
    path: tuple[str, ...]
    include: str


class CheckError(Exception):
    """The check cannot go on; the text is one sentence."""


def ask_interpreter(python: Path, folder: str, runner: Runner = run) -> Interpreter:
    """Start the interpreter as the unit does and ask for its import path.

    :param python: the interpreter of the unit
    :param folder: the unit's working folder; ``python -m`` imports from it first
    :raises CheckError: it does not run
    """
    answer = runner([str(python), "-c", _ASK], timeout=10)
    try:
        said = json.loads(answer.stdout) if answer.ok else None
    except ValueError:
        said = None
    if not isinstance(said, dict):
        reason = answer.error or (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        raise CheckError(f"{str(python)!r} does not run ({reason}); {MEND}")
    path = [folder, *[entry for entry in said["path"] if entry]]
    return Interpreter(said["version"], tuple(path), said["include"])


def import_problems(interpreter: Interpreter, packages: Path) -> list[str]:
    """Find packages that would be imported from somewhere else than the release."""
    found = []
    wanted = packages.resolve()
    for name in _IMPORTED:
        for entry in interpreter.path:
            if (Path(entry) / name / "__init__.py").is_file():
                if Path(entry).resolve() != wanted:
                    found.append(
                        f"{name!r} would be imported from {entry!r} and not from the release; "
                        "remove it there, or take that folder off PYTHONPATH"
                    )
                break
    return found


def module_problems(interpreter: Interpreter, stack: Mapping[str, Any]) -> list[str]:
    """Find modules of source checkouts that are not on the import path; imports nothing."""
    found = []
    for source in stack["sources"]:
        for module in source["modules"]:
            missing = _missing_part(module, list(interpreter.path))
            if missing:
                found.append(
                    f"{module!r} of {source['name']} is not importable ({missing!r} is not found "
                    f"on the unit's PYTHONPATH); {MEND}"
                )
    return found


def _missing_part(module: str, path: Sequence[str]) -> str:
    """Walk down the packages of a module by their files alone; return the part not found."""
    name = ""
    places: Sequence[str] = path
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        # The finder goes by the last part of the name and, unlike find_spec of importlib.util,
        # does not execute the packages above.
        spec = PathFinder.find_spec(name, list(places))
        if spec is None:
            return name
        places = list(spec.submodule_search_locations or [])
    return ""


def tool_problems(
    interpreter: Interpreter, tools: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Find what compiling at run time needs and the unit's environment does not have."""
    path = environment.get("PATH", "")
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or ""
    places = {
        "nvcc": shutil.which("nvcc", path=f"{home}/bin:{path}" if home else path),
        "ninja": shutil.which("ninja", path=path),
        "c++": next(
            (
                hit
                for name in (environment.get("CXX"), "c++", "g++")
                if name and (hit := shutil.which(name, path=path))
            ),
            None,
        ),
        "Python.h": f"{interpreter.include}/Python.h"
        if Path(interpreter.include, "Python.h").is_file()
        else None,
    }
    cures = {
        "nvcc": f"CUDA_HOME is {home!r}: run ansible-playbook site.yml --tags cuda",
        "ninja": f"PATH of the unit lacks the release's venv/bin; {MEND}",
        "c++": "run: apt-get install build-essential",
        "Python.h": f"run: apt-get install python{interpreter.version.rpartition('.')[0]}-dev",
    }
    return [f"{tool} is not found by the unit; {cures[tool]}" for tool in tools if not places[tool]]


def check(
    wanted: release.Release,
    python: Path,
    cache_dir: Path | None,
    environment: Mapping[str, str],
    *,
    refresh: bool = True,
    runner: Runner = run,
) -> tuple[list[str], list[str]]:
    """Run all checks of one release.

    :param wanted: the release that is selected
    :param python: the interpreter of the unit
    :param cache_dir: folder of the compiled kernels; ``None`` to leave them out
    :param environment: the unit's environment
    :param refresh: move kernels aside that may not be used; otherwise they are a failure
    :returns: failures and remarks, one line each
    """
    mark, stack, packages = wanted.mark(), wanted.stack(), wanted.packages
    interpreter = ask_interpreter(python, str(Path.cwd()), runner)
    failures = import_problems(interpreter, packages)
    failures += [f"{text}; {MEND}" for text in release.patched_problems(wanted, mark)]
    have = distributions.installed(packages)
    failures += [f"{text}; {MEND}" for text in coherence.version_problems(have, stack)]
    failures += module_problems(interpreter, stack)
    failures += tool_problems(interpreter, stack["build_tools"], environment)
    remarks = []
    if environment.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        remarks.append("FLASHINFER_DISABLE_VERSION_CHECK hides a real mismatch; remove it")
    if cache_dir is not None and not failures:
        stamp = jit_cache.wanted_stamp(
            wanted.path, mark, environment.get("CUDA_HOME", ""), jit_cache.driver_version()
        )
        state = jit_cache.look(cache_dir, wanted.fingerprint, list(stack["caches"]), stamp)
        if state.reasons and not refresh:
            failures.append(
                f"compiled kernels below {str(state.folder)!r} may not be used: "
                f"{'; '.join(state.reasons)}; restart the service, which moves them aside"
            )
        elif refresh:
            moved = jit_cache.refresh(state, stamp)
            if moved:
                remarks.append(
                    f"moved compiled kernels aside ({'; '.join(state.reasons)}): "
                    f"{', '.join(moved)}; the next start compiles them anew"
                )
    return failures, remarks


def main(argv: list[str]) -> int:
    """Check the selected release; the exit status is 1 when it must not start."""
    parser = argparse.ArgumentParser(prog="vllm-turing-host runtime-check", description=__doc__)
    parser.add_argument("--prefix", required=True, type=Path, help="folder that holds current")
    parser.add_argument("--cache-dir", type=Path, help="folder of the compiled kernels")
    parser.add_argument("--python", type=Path, help="interpreter of the unit")
    parser.add_argument(
        "--read-only", action="store_true", help="report stale kernels, leave them where they are"
    )
    options = parser.parse_args(argv)
    started = time.monotonic()
    fingerprint = release.selected(options.prefix, "current")
    if not fingerprint:
        current = str(options.prefix / "current")
        print(f"runtime-check: {current!r} selects no release; {MEND}", file=sys.stderr)
        return 1
    wanted = release.Release(options.prefix, fingerprint)
    python = options.python or options.prefix / "current/venv/bin/python"
    try:
        failures, remarks = check(
            wanted, python, options.cache_dir, os.environ, refresh=not options.read_only
        )
    except (CheckError, release.ReleaseError) as error:
        failures, remarks = [str(error)], []
    except OSError as error:
        failures, remarks = [f"{error.filename!r}: {error.strerror}; {MEND}"], []
    for line in remarks:
        print(f"runtime-check: {line}")
    for line in failures:
        print(f"runtime-check: {line}", file=sys.stderr)
    if not failures:
        took = time.monotonic() - started
        print(f"runtime-check: release {fingerprint} is as it was built ({took:.2f} s)")
    return 1 if failures else 0
