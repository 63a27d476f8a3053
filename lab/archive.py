"""Publish the stub packages as two signed apt archives: Ubuntu's and the GPU vendor's."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from lab import debs
from lab.command import Runner, run
from lab.errors import LabError
from lab.state import State

SUITE = "noble-updates"
COMPONENTS = ("main", "restricted")
UBUNTU_KEY = "lab-ubuntu-archive"
NVIDIA_KEY = "lab-nvidia-archive"
# Name of the vendor's public key file, as on the vendor's server.
NVIDIA_KEY_FILE = "3bf863cc.pub"


def gpg(state: State, *arguments: str, runner: Runner = run, stdin: str | None = None) -> str:
    """Run gpg on the lab's own key ring, never on the user's."""
    base = ["gpg", "--homedir", str(state.keys), "--batch", "--quiet", "--no-tty", "--yes"]
    return runner([*base, *arguments], stdin=stdin, timeout=120)


def ensure_keys(state: State, runner: Runner = run) -> None:
    """Generate the two archive keys once; they have no passphrase and sign nothing but the lab."""
    state.keys.mkdir(parents=True, exist_ok=True)
    state.keys.chmod(0o700)
    try:
        for name in (UBUNTU_KEY, NVIDIA_KEY):
            public = state.keys / f"{name}.asc"
            if public.is_file():
                continue
            options = ["--passphrase", "", "--quick-generate-key"]
            gpg(state, *options, f"{name} <lab@vllm-turing.invalid>", "rsa3072", "sign", "never")
            gpg(state, "--armor", "--output", str(public), "--export", name)
            gpg(state, "--output", str(state.keys / f"{name}.gpg"), "--export", name)
    finally:
        # the agent that gpg starts would outlive the lab
        runner(["gpgconf", "--homedir", str(state.keys), "--kill", "gpg-agent"], check=False)


def fingerprint(state: State, name: str, runner: Runner = run) -> str:
    """Fingerprint of one archive key."""
    text = runner(
        ["gpg", "--batch", "--show-keys", "--with-colons", str(state.keys / f"{name}.asc")]
    )
    match = re.search(r"^fpr:::::::::([0-9A-F]{40}):", text, re.MULTILINE)
    if not match:
        raise LabError(f"The key file '{state.keys / name}.asc' is damaged; remove '{state.keys}'.")
    return match.group(1)


def filter_gone(index: str, gone: set[str]) -> str:
    """Leave the stanzas out of a Packages index whose file name is in `gone`."""
    kept = []
    for stanza in index.split("\n\n"):
        match = re.search(r"^Filename: .*?([^/\n]+)$", stanza, re.MULTILINE)
        if match and match.group(1) not in gone:
            kept.append(stanza.strip("\n"))
    return "\n\n".join(kept) + "\n"


def release(folder: Path, fields: dict[str, str], runner: Runner = run) -> str:
    """Write the Release text of a folder of indexes."""
    options = [
        part for k, v in fields.items() for part in ("-o", f"APT::FTPArchive::Release::{k}={v}")
    ]
    return runner(["apt-ftparchive", *options, "release", "."], cwd=folder)


def sign(state: State, folder: Path, key: str) -> None:
    """Sign a folder's Release file, inline and detached."""
    options = ["--local-user", key, "--digest-algo", "SHA512"]
    gpg(
        state,
        *options,
        "--output",
        str(folder / "InRelease"),
        "--clearsign",
        str(folder / "Release"),
    )
    options += ["--armor", "--output", str(folder / "Release.gpg")]
    gpg(state, *options, "--detach-sign", str(folder / "Release"))


def publish_ubuntu(state: State, root: Path, packages: list[debs.Package], runner: Runner) -> None:
    """Write the indexes of the Ubuntu archive, complete and as it is now.

    'dists' lists everything, 'dists-current' leaves out what has left the real archive.
    """
    gone = {p.filename for p in packages if p.gone}
    for folder, without in (("dists", set[str]()), ("dists-current", gone)):
        suite = root / folder / SUITE
        for component in COMPONENTS:
            text = runner(["apt-ftparchive", "packages", f"pool/{component}"], cwd=root)
            target = suite / component / "binary-amd64"
            target.mkdir(parents=True)
            (target / "Packages").write_text(filter_gone(text, without), encoding="utf-8")
        fields = {
            "Origin": "Ubuntu",
            "Label": "Ubuntu",
            "Suite": SUITE,
            "Codename": "noble",
            "Version": "24.04",
            "Architectures": "amd64",
            "Components": " ".join(COMPONENTS),
            "Description": "Stand-in packages of the vllm-turing lab",
        }
        (suite / "Release").write_text(release(suite, fields, runner), encoding="utf-8")
        sign(state, suite, UBUNTU_KEY)


def publish_nvidia(state: State, root: Path, runner: Runner) -> None:
    """Write the indexes of the vendor's archive: flat, as the real one."""
    (root / "Packages").write_text(
        runner(["apt-ftparchive", "packages", "."], cwd=root), encoding="utf-8"
    )
    fields = {"Origin": "NVIDIA", "Label": "NVIDIA CUDA", "Architecture": "x86_64"}
    (root / "Release").write_text(release(root, fields, runner), encoding="utf-8")
    sign(state, root, NVIDIA_KEY)
    shutil.copyfile(state.keys / f"{NVIDIA_KEY}.asc", root / NVIDIA_KEY_FILE)


def publish(state: State, progress: Callable[[str], None], runner: Runner = run) -> Path:
    """Return the published archives, built if they are not cached; 'apt/current' points there."""
    ensure_keys(state, runner)
    name = debs.sources_digest(fingerprint(state, NVIDIA_KEY), fingerprint(state, UBUNTU_KEY))
    done = state.apt / name
    if not done.is_dir():
        packages = debs.load()
        progress(f"package archives: building {len(packages)} stub packages")
        draft = state.apt / f"{name}.part"
        shutil.rmtree(draft, ignore_errors=True)
        work = draft / "work"
        work.mkdir(parents=True)
        key = (state.keys / f"{NVIDIA_KEY}.gpg").read_bytes()
        debs.Builder(work, key, runner).build_all(packages, draft)
        shutil.rmtree(work)
        progress("package archives: indexing and signing")
        publish_ubuntu(state, draft / "ubuntu", packages, runner)
        publish_nvidia(state, draft / "nvidia", runner)
        runner(["gpgconf", "--homedir", str(state.keys), "--kill", "gpg-agent"], check=False)
        draft.rename(done)
    link = state.apt / "current"
    if not link.is_symlink() or link.readlink() != Path(name):
        draft_link = state.apt / "current.new"
        draft_link.unlink(missing_ok=True)
        draft_link.symlink_to(name)
        draft_link.replace(link)
    for other in state.apt.iterdir():
        if other.name not in (name, "current"):
            shutil.rmtree(other, ignore_errors=True)
    return done
