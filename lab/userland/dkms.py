"""dkms of the box: registers, builds and installs the stand-in modules in the real layout.

It refuses what the real one refuses (no headers for the kernel, no source tree) with its words,
keeps make.log where it is looked for, and prints the status lines of dkms 3.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TREE = Path("/var/lib/dkms")
SOURCE = Path("/usr/src")
MODULES = Path("/lib/modules")
# 'touch' this file to make every build fail, as a source that does not fit the kernel does.
BROKEN = Path("/var/lib/vllm-turing-lab/dkms-broken")
# Signature block of a module signed with the machine owner's key (struct module_signature).
OWNER = b"lab Secure Boot Module Signature key"


def signature(signer: bytes) -> bytes:
    """Return an appended signature in the kernel's layout, with a raw signer name."""
    key_id, body = b"\1" * 20, b"\0" * 256
    block = bytes([1, 4, 1, len(signer), len(key_id), 0, 0, 0]) + len(body).to_bytes(4, "big")
    return signer + key_id + body + block + b"~Module signature appended~\n"


def registered() -> list[tuple[str, str]]:
    """Return the (module, version) pairs in the tree."""
    return sorted((p.parent.parent.name, p.parent.name) for p in TREE.glob("*/*/source"))


def status() -> int:
    """Print one line for each module, version and kernel."""
    for module, version in registered():
        built = sorted(
            p.name for p in (TREE / module / version).iterdir() if (p / "x86_64/module").is_dir()
        )
        for kernel in built:
            target = MODULES / kernel / f"updates/dkms/{module}.ko"
            state = "installed" if target.is_file() else "built"
            print(f"{module}/{version}, {kernel}, x86_64: {state}")
        if not built:
            print(f"{module}/{version}: added")
    return 0


def build(module: str, version: str, kernel: str) -> int:
    """Build a module for a kernel out of its source tree."""
    if not (MODULES / kernel / "build").exists():
        print(
            f"Error! Your kernel headers for kernel {kernel} cannot be found at "
            f"/lib/modules/{kernel}/build or /lib/modules/{kernel}/source.\n"
            f"Please install the linux-headers-{kernel} package or use the --kernelsourcedir "
            "option to tell DKMS where it's located.",
            file=sys.stderr,
        )
        return 1
    work = TREE / module / version / "build"
    work.mkdir(parents=True, exist_ok=True)
    out = TREE / module / version / kernel / "x86_64"
    # "Building" is taking the object that the source package carries for this kernel.
    objects = sorted((SOURCE / f"{module}-{version}/prebuilt" / kernel).glob("*.ko"))
    if BROKEN.exists() or not objects:
        (work / "make.log").write_text(
            f"DKMS make.log for {module}-{version} for kernel {kernel} (x86_64)\n"
            "nvidia/nv.c:1: error: implicit declaration of function 'lab_broken'\n",
            encoding="utf-8",
        )
        print(
            f"Error! Bad return status for module build on kernel: {kernel} (x86_64)\n"
            f"Consult {work}/make.log for more information.",
            file=sys.stderr,
        )
        return 10
    (out / "module").mkdir(parents=True, exist_ok=True)
    (out / "log").mkdir(exist_ok=True)
    for path in objects:
        (out / "module" / path.name).write_bytes(path.read_bytes() + signature(OWNER))
    text = f"DKMS make.log for {module}-{version} for kernel {kernel} (x86_64)\n"
    (out / "log/make.log").write_text(text, encoding="utf-8")
    shutil.rmtree(work)
    return 0


def install(module: str, version: str, kernel: str) -> int:
    """Install a built module into the kernel's updates folder."""
    source = TREE / module / version / kernel / "x86_64/module"
    if not source.is_dir():
        trouble = build(module, version, kernel)
        if trouble:
            return trouble
    target = MODULES / kernel / "updates/dkms"
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.ko"):
        shutil.copyfile(path, target / path.name)
    subprocess.run(["/sbin/depmod", "-a", kernel], check=True)
    return 0


def remove(module: str, version: str) -> int:
    """Take a version out of the tree and out of every kernel."""
    root = TREE / module / version
    for folder in root.glob("*/x86_64/module"):
        kernel = folder.parent.parent.name
        for path in folder.glob("*.ko"):
            (MODULES / kernel / "updates/dkms" / path.name).unlink(missing_ok=True)
        if (MODULES / kernel).is_dir():
            subprocess.run(["/sbin/depmod", "-a", kernel], check=True)
    shutil.rmtree(root, ignore_errors=True)
    return 0


def kernels() -> list[str]:
    """Kernels that have modules and a boot image."""
    return sorted(p.name.removeprefix("vmlinuz-") for p in Path("/boot").glob("vmlinuz-*"))


def main(argv: list[str]) -> int:
    """Dispatch on the verb."""
    arguments = argv[1:]
    verb = arguments[0] if arguments else "status"
    options: dict[str, str] = {}
    names = []
    rest = iter(arguments[1:])
    for argument in rest:
        if argument in ("-m", "-v", "-k", "--kernelver"):
            options[argument] = next(rest, "")
        elif argument.startswith("--kernelver="):
            options["-k"] = argument.partition("=")[2]
        elif not argument.startswith("-"):
            names.append(argument)
    module, _, version = (names[0] if names else "").partition("/")
    module, version = options.get("-m", module), options.get("-v", version)
    kernel = options.get("-k") or options.get("--kernelver") or os.uname().release
    if verb == "status":
        return status()
    if verb == "add":
        root = TREE / module / version
        root.mkdir(parents=True, exist_ok=True)
        link = root / "source"
        if not link.is_symlink():
            link.symlink_to(SOURCE / f"{module}-{version}")
        return 0
    if verb == "autoinstall":
        wanted = [kernel]
        return max([install(m, v, k) for m, v in registered() for k in wanted], default=0)
    if verb == "remove":
        return remove(module, version)
    if verb in ("build", "install"):
        return (build if verb == "build" else install)(module, version, kernel)
    print(f"Error! Unknown action specified: '{verb}'", file=sys.stderr)
    return 4


if __name__ == "__main__":
    sys.exit(main(sys.argv))
