"""Checks of CUDA toolkits, library paths and what compiling at run time needs."""

from __future__ import annotations

import json
import re

from ..preflight_check import (
    Context,
    Outcome,
    Unit,
    check,
    failed,
    listing,
    passed,
    skipped,
    warned,
)
from ..preflight_units import venv

_LINK = "/usr/local/cuda"


def toolkit_release(context: Context, home: str) -> str:
    """Return the release of a toolkit (``12.9``), by version.json or nvcc; empty when unknown."""
    try:
        document = json.loads(context.host.read(f"{home}/version.json") or "{}")
        version = str(document.get("cuda", {}).get("version", ""))
    except (ValueError, AttributeError):
        version = ""
    match = re.match(r"(\d+\.\d+)", version)
    if match:
        return match.group(1)
    if not context.host.exists(f"{home}/bin/nvcc"):
        return ""
    answer = context.host.run((f"{home}/bin/nvcc", "--version"))
    found = re.search(r"release (\d+\.\d+)", answer.stdout) if answer.ok else None
    return found.group(1) if found else ""


@check("cuda", "cuda_toolkit")
def cuda_toolkit(context: Context) -> Outcome:
    """Check that the wanted toolkit is there and is what its folder's name says."""
    if context.wish.cpu:
        return skipped("this stack needs no toolkit")
    home, wanted = context.wish.text("cuda_toolkit_home"), context.wish.text("cuda_toolkit_version")
    if not context.host.exists(f"{home}/bin/nvcc"):
        others = [path for path in context.host.glob("/usr/local", "cuda-*")
                  if context.host.exists(f"{path}/bin/nvcc")]  # fmt: skip
        return skipped(
            f"CUDA {wanted} is not there yet; role cuda_toolkit installs it",
            f"there is: {listing(others)}" if others else "",
        )
    release = toolkit_release(context, home)
    if release == wanted:
        return passed(f"CUDA {release} in {home}")
    if not release:
        return warned(
            f"the toolkit in {home} does not tell its release",
            f"{home}/version.json, {home}/bin/nvcc --version",
            f"apt-get install --reinstall cuda-nvcc-{wanted.replace('.', '-')}",
        )
    return failed(
        f"{home} holds CUDA {release}, not {wanted}",
        f"{home}/version.json",
        f"set cuda_toolkit_home to the folder of CUDA {wanted}",
    )


@check("cuda", "cuda_link")
def cuda_link(context: Context) -> Outcome:
    """Check that ``/usr/local/cuda`` leads to a toolkit that fits the stack."""
    host, wanted = context.host, context.wish.text("cuda_toolkit_version")
    if context.wish.cpu:
        return skipped("this stack needs no toolkit")
    users = [
        unit for unit in context.units
        if any(re.search(rf"{_LINK}(/|:|$)", value) for value in unit.environment.values())
    ]  # fmt: skip
    in_use = f"; used by {listing([unit.name for unit in users])}" if users else ""
    if not host.is_link(_LINK) and not host.exists(_LINK):
        if users:
            return failed(f"{_LINK} is not there{in_use}", _LINK, _versioned_fix(context))
        return skipped(f"{_LINK} is not there, and nothing uses it")
    target = host.resolve(_LINK)
    if target is None:
        return failed(
            f"{_LINK} is a dangling link to '{host.link_target(_LINK)}'{in_use}",
            _LINK,
            "update-alternatives --auto cuda, or remove the link",
        )
    release = toolkit_release(context, target)
    if not release:
        return warned(f"{_LINK} leads to {target}, which tells no release{in_use}", target)
    kind = f"-> {target}" if host.is_link(_LINK) else "a real folder"
    if release == wanted:
        return passed(f"{_LINK} ({kind}) is CUDA {release}")
    if not users:
        return passed(f"{_LINK} ({kind}) is CUDA {release}; nothing here uses it")
    text = f"{_LINK} ({kind}) is CUDA {release}, the stack needs {wanted}{in_use}"
    if release.split(".")[0] == wanted.split(".")[0]:
        return warned(text, target, _versioned_fix(context))
    return failed(
        text,
        target,
        _versioned_fix(context),
        mended_by="vllm_service" if all(unit.ours for unit in users) else "",
    )


def _versioned_fix(context: Context) -> str:
    home = context.wish.text("cuda_toolkit_home")
    return f"use the versioned path: CUDA_HOME={home} in the unit"


def _stub_places(unit: Unit) -> list[str]:
    value = unit.environment.get("LD_LIBRARY_PATH", "")
    return [part for part in value.split(":") if re.search(r"(^|/)stubs(/|$)", part)]


@check("cuda", "cuda_stubs")
def cuda_stubs(context: Context) -> Outcome:
    """Check that no folder of stub libraries is searched at run time."""
    host = context.host
    found: list[tuple[str, str, str]] = []
    for unit in context.units:
        for place in _stub_places(unit):
            found.append((place, unit.origin.get("LD_LIBRARY_PATH", unit.name), unit.name))
    for file in ["/etc/ld.so.conf", *host.glob("/etc/ld.so.conf.d", "*.conf")]:
        for number, line in enumerate((host.read(file) or "").splitlines(), 1):
            if re.search(r"/stubs/?\s*$", line) and not line.strip().startswith("#"):
                found.append((line.strip(), f"{file}:{number}", file))
    if not found:
        if not host.exists("/etc/ld.so.conf"):
            return skipped("/etc/ld.so.conf cannot be read")
        return passed("neither a unit nor ld.so.conf names one")
    where = listing([f"{place} in {origin}" for place, origin, _ in found])
    fix = f"remove it in {listing([origin for _, origin, _ in found])}; linking needs LIBRARY_PATH"
    loaded = [place for place, _, _ in found if host.exists(f"{place}/libcuda.so.1")]
    if loaded:
        return failed(
            f"a stub libcuda.so.1 would be loaded instead of the driver's: {where}",
            f"{loaded[0]}/libcuda.so.1",
            fix,
        )
    return warned(
        f"stub libraries are on the library path: {where} (CUDA error 34 for what asks for "
        "libcuda.so)",
        "the reference host's unit has this line",
        fix,
    )


@check("cuda", "cuda_home")
def cuda_home(context: Context) -> Outcome:
    """Check that CUDA_HOME of the units is a versioned path to a toolkit."""
    units = [unit for unit in context.units if "CUDA_HOME" in unit.environment]
    if not units:
        return skipped("no unit sets CUDA_HOME")
    for unit in units:
        value = unit.environment["CUDA_HOME"]
        origin = unit.origin.get("CUDA_HOME", unit.name)
        mended = "vllm_service" if unit.ours else ""
        if not context.host.exists(f"{value}/bin/nvcc") and not context.wish.cpu:
            return failed(
                f"CUDA_HOME '{value}' has no bin/nvcc: the first kernel cannot be compiled",
                origin,
                _versioned_fix(context),
                mended_by=mended or "cuda_toolkit",
            )
        if not re.search(r"\d+\.\d+/*$", value):
            return warned(
                f"CUDA_HOME '{value}' names no version: a later toolkit moves it",
                origin,
                _versioned_fix(context),
                mended_by=mended,
            )
    return passed(listing([f"{u.name}: {u.environment['CUDA_HOME']}" for u in units]))


@check("cuda", "build_tools")
def build_tools(context: Context) -> Outcome:
    """Check that what compiling at run time needs is found with the service's own PATH."""
    host, wish = context.host, context.wish
    if not context.units:
        compiler = host.which("c++", "/usr/bin:/bin") or host.which("g++", "/usr/bin:/bin")
        headers = _python_headers(context, "")
        if compiler and headers:
            return passed(f"{compiler}, {headers}")
        return skipped("no unit yet; role vllm_host installs build-essential and python3-dev")
    for unit in context.units:
        path = unit.environment.get("PATH") or (
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        )
        missing = []
        home = unit.environment.get("CUDA_HOME", "")
        wanted = wish.stack.get("build_tools") or ["nvcc", "ninja", "c++", "Python.h"]
        has_nvcc = (home and host.exists(f"{home}/bin/nvcc")) or host.which("nvcc", path)
        if "nvcc" in wanted and not wish.cpu and not has_nvcc:
            missing.append("nvcc (role cuda_toolkit, or its bin folder on PATH)")
        if "ninja" in wanted and not host.which("ninja", path):
            there = f"{venv(unit)}/bin/ninja"
            where = f"it is {there}: put that folder on PATH" if host.exists(there) else "ninja"
            missing.append(f"ninja ({where})")
        if "c++" in wanted and not (host.which("c++", path) or host.which("g++", path)):
            missing.append("a C++ compiler (package build-essential)")
        if "Python.h" in wanted and not _python_headers(context, venv(unit)):
            missing.append("Python.h (package python3-dev)")
        if missing:
            return failed(
                f"{unit.name} could not compile its kernels; missing: {listing(missing)}",
                f"PATH of {unit.origin.get('PATH', unit.files[0])}: {path}",
                "install what is named, or let site.yml take the host over",
                mended_by="vllm_service" if unit.ours else "vllm_host",
            )
    return passed(listing([f"{unit.name} finds them" for unit in context.units]))


def _python_headers(context: Context, environment: str) -> str:
    """Return where Python.h is for a venv's version, or for any; empty when it is nowhere."""
    version = ""
    for line in (context.host.read(f"{environment}/pyvenv.cfg") or "").splitlines():
        match = re.match(r"version(?:_info)?\s*=\s*(3\.\d+)", line)
        version = match.group(1) if match else version
    names = [f"python{version}"] if version else [
        name for name in context.host.listdir("/usr/include") if re.fullmatch(r"python3\.\d+", name)
    ]  # fmt: skip
    for name in names:
        for folder in ("/usr/include", "/usr/local/include"):
            if context.host.exists(f"{folder}/{name}/Python.h"):
                return f"{folder}/{name}/Python.h"
    return ""
