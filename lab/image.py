"""Build the box image: a fresh server, presented as Ubuntu 24.04, with the stand-in kernel.

Two layers, each cached under a digest of what goes in: the base (debootstrap, a minute) and the
box (the base plus presentation, certificates, indexes and the kernel packages; seconds).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from lab import ubuntu
from lab.command import Runner, run
from lab.controller import AptSource, Controller, Limits
from lab.errors import LabError
from lab.state import CONTROLLER_FROM_INSIDE, State

Progress = Callable[[str], None]

# What a fresh Ubuntu server has and the roles may count on; compilers, git and the Python venv
# module are left out on purpose: installing them is the roles' work.
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "sudo",
    "openssh-server",
    "ca-certificates",
    "kmod",
    "iproute2",
    "procps",
    "gnupg",
    "acl",
    "python3",
    "python3-apt",
    "pciutils",
    "lsb-release",
    "curl",
    "logrotate",
    "less",
    "netbase",
    "tzdata",
    "zstd",
)
# Installed in every box: the kernel a fresh box runs, and the lab's own package that presents it.
KERNEL_PACKAGES = (
    "initramfs-tools",
    "linux-base",
    "linux-modules-6.17.0-29-generic",
    "linux-image-6.17.0-29-generic",
    "linux-headers-6.17.0-29-generic",
    "linux-image-generic-hwe-24.04",
    "linux-headers-generic-hwe-24.04",
    "linux-generic-hwe-24.04",
    "mokutil",
    "vllm-turing-lab",
)
KERNEL_RELEASE = "6.17.0-29"
# On a real Ubuntu base the real kernel must not replace the stand-in one.
KERNEL_PREFERENCE = f"""\
Package: linux-* initramfs-tools* dkms mokutil
Pin: origin "{CONTROLLER_FROM_INSIDE}"
Pin-Priority: 1001
"""
ADMIN = "admin"
# These go into the digests: raise one when the steps of its layer change.
BASE_RECIPE = 4
BOX_RECIPE = 3


def digest(*parts: object) -> str:
    """Digest of anything that can be written as JSON."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def base_digest(controller: Controller) -> str:
    """Digest of what decides the base layer."""
    return digest(
        BASE_RECIPE, PACKAGES, controller.codename, [asdict(s) for s in controller.sources]
    )


def box_digest(controller: Controller, archive: str) -> str:
    """Digest of what decides the box layer; `archive` is the digest of the package archive."""
    inputs = (asdict(controller), KERNEL_PACKAGES, ubuntu.presentation())
    return digest(BOX_RECIPE, base_digest(controller), archive, *inputs)


def deb822(source: AptSource, keyring: str) -> str:
    """Write one source in the deb822 format."""
    return (
        f"Types: deb\nURIs: {source.uri}\nSuites: {' '.join(source.suites)}\n"
        f"Components: {' '.join(source.components)}\nSigned-By: {keyring}\n"
    )


def environment_lines(controller: Controller) -> list[str]:
    """Lines of /etc/environment that carry the controller's proxies and certificates over."""
    lines = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    for name, value in controller.proxies:
        lines += [f"{name}={value}", f"{name.upper()}={value}"]
    if controller.certificates:
        bundle = "/etc/ssl/certs/ca-certificates.crt"
        lines += [f"{v}={bundle}" for v in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT")]
    return lines


def pip_conf(controller: Controller) -> str:
    """Write /etc/pip.conf: the box trusts and asks what the controller trusts and asks."""
    lines = ["[global]"]
    if controller.certificates:
        lines.append("cert = /etc/ssl/certs/ca-certificates.crt")
    if controller.indexes.index:
        lines.append(f"index-url = {controller.indexes.index}")
    if controller.indexes.extra:
        lines.append(f"extra-index-url = {' '.join(controller.indexes.extra)}")
    return "\n".join(lines) + "\n"


def uv_toml(controller: Controller) -> str:
    """Write /etc/uv/uv.toml, uv's view of the same."""
    lines = []
    if controller.certificates:
        lines.append("native-tls = true")
    if controller.indexes.index:
        lines.append(f"index-url = {json.dumps(controller.indexes.index)}")
    if controller.indexes.extra:
        lines.append(f"extra-index-url = {json.dumps(list(controller.indexes.extra))}")
    return "".join(line + "\n" for line in lines)


def mounts_below(folder: Path, mountinfo: str) -> list[str]:
    """Return the mount points at or below a folder, deepest first."""
    points = [line.split()[4] for line in mountinfo.splitlines() if line.count(" ") > 4]
    inside = [p for p in points if p == str(folder) or p.startswith(f"{folder}/")]
    return sorted(inside, key=len, reverse=True)


def discard(path: Path) -> None:
    """Remove a file or folder; what an interrupted build left mounted below it goes first."""
    if path.is_dir() and not path.is_symlink():
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
        for point in mounts_below(path.resolve(), mountinfo):
            run(["umount", "--lazy", point])
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write(root: Path, path: str, text: str, mode: int = 0o644) -> None:
    """Write a file of the box."""
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()
    target.write_text(text, encoding="utf-8")
    target.chmod(mode)


def in_root(
    root: Path,
    script: str,
    *,
    runtime: str,
    limits: Limits,
    log: Path,
    runner: Runner = run,
    mounts: tuple[str, ...] = (),
) -> None:
    """Run a shell script inside a root folder, in a container that leaves nothing behind."""
    volumes = [part for m in mounts for part in ("-v", m)]
    runner(
        [
            "podman",
            "--runtime",
            runtime,
            "run",
            "--rm",
            "--network",
            "host",
            "--ulimit",
            f"nofile={limits.nofile}:{limits.nofile}",
            "--ulimit",
            f"nproc={limits.nproc}:{limits.nproc}",
            "-e",
            "DEBIAN_FRONTEND=noninteractive",
            "-e",
            "LC_ALL=C",
            *volumes,
            "--rootfs",
            str(root),
            "/bin/sh",
            "-ec",
            script,
        ],
        timeout=900,
        log=log,
        # certificates and proxies of the controller name paths that the box does not have
        inherit_env=False,
    )


def build_base(
    state: State,
    controller: Controller,
    runtime: str,
    limits: Limits,
    progress: Progress,
    runner: Runner = run,
) -> Path:
    """Return the base layer, built if it is not cached yet."""
    done = state.images / f"base-{base_digest(controller)}"
    if done.is_dir():
        return done
    state.images.mkdir(parents=True, exist_ok=True)
    log = state.images / f"{done.name}.log"
    source = controller.base
    keyring = (
        source.signed_by or f"/usr/share/keyrings/{controller.distribution}-archive-keyring.gpg"
    )
    if not Path(keyring).is_file():
        raise LabError(
            f"The archive's keyring '{keyring}' is missing; install the keyring package."
        )
    draft = state.images / f"{done.name}.part"
    discard(draft)
    progress(f"box image: debootstrap {controller.codename} (about a minute, once)")
    try:
        runner(
            [
                "debootstrap",
                "--variant=minbase",
                f"--keyring={keyring}",
                f"--components={','.join(source.components)}",
                f"--include={','.join(PACKAGES)}",
                controller.codename,
                str(draft),
                source.uri,
            ],
            timeout=900,
            log=log,
        )
    except LabError as error:
        raise LabError(
            f"The box image could not be built from '{source.uri}' (no network?); see '{log}'."
        ) from error
    (draft / "etc/apt/sources.list").unlink(missing_ok=True)
    blocks = []
    for item in controller.sources:
        path = item.signed_by or keyring
        target = draft / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        blocks.append(deb822(item, path))
    write(draft, "/etc/apt/sources.list.d/base.sources", "\n".join(blocks))
    write(
        draft,
        "/etc/apt/apt.conf.d/90controller",
        "".join(f'{name} "{value}";\n' for name, value in controller.apt_options),
    )
    progress("box image: bringing the base up to date")
    in_root(
        draft,
        "apt-get -q update && apt-get -q -y full-upgrade && apt-get clean",
        runtime=runtime,
        limits=limits,
        log=log,
        runner=runner,
    )
    draft.rename(done)
    return done


def build_box(
    state: State,
    controller: Controller,
    archive: Path,
    runtime: str,
    limits: Limits,
    progress: Progress,
    runner: Runner = run,
) -> Path:
    """Return the box layer, built if it is not cached yet; `archive` is the published archive."""
    done = state.images / f"box-{box_digest(controller, archive.name)}"
    if done.is_dir():
        return done
    base = build_base(state, controller, runtime, limits, progress, runner)
    log = state.images / f"{done.name}.log"
    draft = state.images / f"{done.name}.part"
    discard(draft)
    progress("box image: presenting it as Ubuntu 24.04 with its kernel")
    runner(["cp", "-a", "--reflink=auto", str(base), str(draft)], timeout=300)
    if controller.distribution != "ubuntu":
        for path, text in ubuntu.presentation().items():
            write(draft, path, text)
        origin = draft / "etc/dpkg/origins/default"
        origin.unlink(missing_ok=True)
        origin.symlink_to("ubuntu")
    else:
        write(draft, "/etc/apt/preferences.d/lab", KERNEL_PREFERENCE)
    for number, certificate in enumerate(controller.certificates):
        write(draft, f"/usr/local/share/ca-certificates/controller-{number}.crt", certificate)
    write(draft, "/etc/environment", "\n".join(environment_lines(controller)) + "\n")
    write(draft, "/etc/pip.conf", pip_conf(controller))
    write(draft, "/etc/uv/uv.toml", uv_toml(controller))
    write(draft, f"/etc/sudoers.d/{ADMIN}", f"{ADMIN} ALL=(ALL) NOPASSWD:ALL\n", 0o440)
    write(
        draft,
        "/etc/ssh/sshd_config.d/lab.conf",
        "HostKey /etc/ssh/ssh_host_ed25519_key\nPasswordAuthentication no\nUseDNS no\n",
    )
    # The box is thrown away, never trusted with data: dpkg need not wait for the disk.
    write(draft, "/etc/dpkg/dpkg.cfg.d/lab", "force-unsafe-io\n")
    debs = [str(find_deb(archive, name)) for name in KERNEL_PACKAGES]
    inside = " ".join(f"/run/lab-archive/{Path(d).relative_to(archive)}" for d in debs)
    in_root(
        draft,
        # base-files must not put its own release files back when the box is upgraded
        "dpkg-divert --quiet --local --no-rename --divert /usr/lib/os-release.distrib"
        " --add /usr/lib/os-release\n"
        f"useradd --create-home --shell /bin/bash --groups adm,sudo {ADMIN}\n"
        "mkdir -p /var/log/journal\n"
        "update-ca-certificates\n"
        f"dpkg --install {inside}\n"
        "systemctl enable ssh.service\n"
        "rm -f /etc/ssh/ssh_host_* /etc/machine-id && touch /etc/machine-id\n",
        runtime=runtime,
        limits=limits,
        log=log,
        runner=runner,
        mounts=(f"{archive}:/run/lab-archive:ro",),
    )
    draft.rename(done)
    prune(state, keep=(done.name, f"base-{base_digest(controller)}"))
    return done


def prune(state: State, keep: tuple[str, ...]) -> None:
    """Remove images and logs that no later 'up' would use."""
    for path in state.images.iterdir():
        if path.name.removesuffix(".log") not in keep:
            discard(path)


def find_deb(archive: Path, name: str) -> Path:
    """Find the package file of `name` for the kernel a fresh box runs."""
    found = sorted((archive / "ubuntu/pool").rglob(f"{name}_*.deb"))
    matching = [p for p in found if f"_{KERNEL_RELEASE}." in p.name] or found
    if not matching:
        raise LabError(f"The lab's package archive has no '{name}'; remove '{archive}'.")
    return matching[0]
