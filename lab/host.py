"""One lab host: its life from the image to the end, and what others need to reach it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import archive, controller, image, mirrors
from lab.command import Runner, run
from lab.errors import LabError
from lab.state import CONTROLLER_FROM_INSIDE, State, default_state, read_json, write_json

Progress = Callable[[str], None]

ADDRESS = "127.0.0.1"
FIRST_PORT = 18622
BOOT_SECONDS = 60.0
# The container's first program: the simulated boot, which then becomes systemd.
INIT = "/usr/lib/vllm-turing-lab/lab-kernel"
PREFIX = "opt/vllm-turing"


@dataclass(frozen=True)
class Status:
    """What is known about a lab host."""

    name: str
    exists: bool
    running: bool
    reachable: bool
    port: int
    mirror: str


def quiet(_: str) -> None:
    """Take a progress line and show nothing."""


class Lab:
    """A simulated host called `name`, kept below the state directory."""

    def __init__(
        self, name: str = "lab", state_dir: Path | str | None = None, runner: Runner = run
    ) -> None:
        """Name the host; nothing is started or read yet."""
        self.state = State(Path(state_dir).resolve()) if state_dir else default_state()
        self.name = name
        self.runner = runner
        self.folder = self.state.host(name)
        self.rootfs = self.folder / "rootfs"
        # Two state directories may both have a host called 'lab'.
        mark = hashlib.sha256(str(self.state.root).encode()).hexdigest()[:6]
        self.container = f"vllm-turing-{name}-{mark}"

    # ---------------------------------------------------------------- what others ask for

    @property
    def connection_file(self) -> Path:
        """JSON file with everything an SSH client or an inventory needs."""
        return self.folder / "connection.json"

    def connection(self) -> dict[str, Any]:
        """Return the connection details of the host; raise LabError when there is no such host."""
        data = read_json(self.connection_file)
        if not data:
            raise LabError(f"There is no lab host '{self.name}'; start it with 'python -m lab up'.")
        return data

    def ssh_command(self, *remote: str, tty: bool = False) -> list[str]:
        """Return the argv of an SSH connection to the host, host-key checking on."""
        known = self.connection()
        options = [
            f"UserKnownHostsFile={known['known_hosts']}",
            "StrictHostKeyChecking=yes",
            "IdentitiesOnly=yes",
            "ConnectTimeout=10",
            "LogLevel=ERROR",
        ]
        argv = ["ssh", "-F", "none", "-i", known["private_key"], "-p", str(known["port"])]
        for option in options:
            argv += ["-o", option]
        if tty:
            argv.append("-t")
        else:
            argv += ["-o", "BatchMode=yes"]
        return [*argv, f"{known['user']}@{known['host']}", *remote]

    def ssh(self, command: str, *, timeout: float = 60.0, check: bool = True) -> str:
        """Run a shell command on the host as the admin user and return its output."""
        return self.runner(self.ssh_command(command), timeout=timeout, check=check)

    def inventory(self) -> dict[str, Any]:
        """Return the facts of all lab hosts, as also written to '<state>/inventory.json'."""
        return read_json(self.state.inventory_file)

    def status(self) -> Status:
        """Look at the host without changing anything."""
        known = read_json(self.connection_file)
        running = self.is_running() if known else False
        return Status(
            name=self.name,
            exists=bool(known),
            running=running,
            reachable=running and self.answers_ssh(),
            port=int(known.get("port", 0)),
            mirror=str(known.get("mirror", "")),
        )

    # ---------------------------------------------------------------- life

    def up(self, progress: Progress = quiet, port: int | None = None) -> dict[str, Any]:
        """Build, boot and wait for the host; a running one is left alone. Return its connection."""
        controller.require_root()
        with self.lock():
            return self._up(progress, port)

    def _up(self, progress: Progress, port: int | None) -> dict[str, Any]:
        self.state.root.mkdir(parents=True, exist_ok=True)
        lacking = controller.missing_packages()
        if lacking:
            progress(f"controller: installing {' '.join(lacking)}")
            controller.install_packages(lacking, self.state.root / "apt.log", self.runner)
        published = archive.publish(self.state, progress, self.runner)
        mirror_port = mirrors.ensure(self.state, progress)
        known = read_json(self.connection_file)
        if known and self.rootfs.is_dir() and self.is_running():
            if port not in (None, int(known["port"])):
                raise LabError(
                    f"The lab host '{self.name}' runs on port '{known['port']}'; "
                    "take it down before you ask for another."
                )
        else:
            here = controller.detect(runner=self.runner)
            runtime, limits = controller.oci_runtime(), controller.limits()
            if not self.rootfs.is_dir():
                box = image.build_box(
                    self.state, here, published, runtime, limits, progress, self.runner
                )
                progress(f"{self.name}: unpacking the box")
                self.create(box, here, mirror_port)
            chosen = self.choose_port(port or int(known.get("port", 0)), asked=port is not None)
            known = self.write_connection(chosen, mirror_port)
            progress(f"{self.name}: booting (ssh on {ADDRESS}:{chosen})")
            self.start(chosen, runtime, limits)
        self.wait(progress)
        self.write_inventory()
        return known

    def down(self, progress: Progress = quiet, everything: bool = False) -> None:
        """Remove the host: container, mounts, folders; the mirror too when it was the last one.

        The image and the package cache stay, unless `everything` is set.
        """
        controller.require_root()
        if not self.state.root.is_dir():
            return
        with self.lock():
            progress(f"{self.name}: removing the container")
            self.remove_container()
            progress(f"{self.name}: removing its files")
            image.discard(self.folder)
            image.discard(self.state.host_store(self.name))
            self.write_known_hosts()
            self.write_inventory()
            if not self.state.host_names() and mirrors.stop(self.state):
                progress("mirror: stopped")
        if everything:
            others = self.state.host_names()
            if others:
                raise LabError(
                    f"The lab host '{others[0]}' is still there; take it down first, "
                    "then run 'down --all' again."
                )
            progress(f"removing '{self.state.root}'")
            image.discard(self.state.root)

    def reset(self, progress: Progress = quiet) -> dict[str, Any]:
        """Give back a fresh box under the same name, port and host key."""
        known = self.connection()
        keep = {n: (self.folder / n).read_bytes() for n in ("host_key", "host_key.pub")}
        controller.require_root()
        with self.lock():
            progress(f"{self.name}: removing the container")
            self.remove_container()
            image.discard(self.rootfs)
            image.discard(self.state.host_store(self.name))
            for name, content in keep.items():
                (self.folder / name).write_bytes(content)
            (self.folder / "host_key").chmod(0o600)
            return self._up(progress, int(known["port"]))

    def reboot(self, progress: Progress = quiet) -> None:
        """Restart the host from outside, as its power button would."""
        before = self.boot_id()
        self.runner(["podman", "restart", "--time", "20", self.container], timeout=90)
        self.wait(progress)
        if self.boot_id() == before:
            raise LabError(f"The lab host '{self.name}' did not restart.")

    def boot_id(self) -> str:
        """Identity of the host's current boot."""
        return self.inside("cat /proc/sys/kernel/random/boot_id").strip()

    # ---------------------------------------------------------------- parts of it

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the state directory: two 'up' at once would build the same image twice."""
        self.state.root.mkdir(parents=True, exist_ok=True)
        with (self.state.root / "lock").open("w", encoding="ascii") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def podman(self, *arguments: str, check: bool = True, timeout: float = 120.0) -> str:
        """Run podman."""
        return self.runner(["podman", *arguments], check=check, timeout=timeout)

    def is_running(self) -> bool:
        """Return whether the container runs."""
        state = self.podman(
            "inspect", "--format", "{{.State.Running}}", self.container, check=False, timeout=30
        )
        return state.strip() == "true"

    def inside(self, script: str, *, timeout: float = 60.0, check: bool = True) -> str:
        """Run a shell script on the host as root, past SSH."""
        return self.podman(
            "exec", self.container, "/bin/sh", "-ec", script, timeout=timeout, check=check
        )

    def create(self, box: Path, here: controller.Controller, mirror_port: int) -> None:
        """Lay out the host's root folder from the box image."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / "rootfs.part"
        image.discard(draft)
        self.runner(["cp", "-a", "--reflink=auto", str(box), str(draft)], timeout=300)
        self.ensure_keys()
        image.write(draft, "/etc/hostname", f"{self.name}\n")
        image.write(draft, "/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        host_key = draft / "etc/ssh/ssh_host_ed25519_key"
        shutil.copyfile(self.folder / "host_key", host_key)
        host_key.chmod(0o600)
        shutil.copyfile(self.folder / "host_key.pub", host_key.with_suffix(".pub"))
        admin = draft / "home" / image.ADMIN
        keys = admin / ".ssh" / "authorized_keys"
        keys.parent.mkdir(mode=0o700)
        shutil.copyfile(self.state.ssh / "id_ed25519.pub", keys)
        owner = admin.stat()
        for path in (keys.parent, keys):
            os.chown(path, owner.st_uid, owner.st_gid)
        keyring = "/usr/share/keyrings/ubuntu-archive-keyring-lab.gpg"
        target = draft / keyring.lstrip("/")
        shutil.copyfile(self.state.keys / f"{archive.UBUNTU_KEY}.gpg", target)
        target.chmod(0o644)
        source = controller.AptSource(
            f"{mirrors.url_from_inside(mirror_port)}/apt/ubuntu",
            (archive.SUITE,),
            archive.COMPONENTS,
        )
        image.write(draft, "/etc/apt/sources.list.d/ubuntu.sources", image.deb822(source, keyring))
        for folder in (self.state.store / "uv", self.state.host_store(self.name) / "opt"):
            folder.mkdir(parents=True, exist_ok=True)
        # Same mount as uv's cache, so that uv can hard-link a release out of it.
        (draft / PREFIX).symlink_to(self.state.host_store(self.name) / "opt")
        environment = draft / "etc/environment"
        with environment.open("a", encoding="utf-8") as text:
            text.write(f"UV_CACHE_DIR={self.state.store}/uv\n")
            if here.proxies:
                text.write(f"no_proxy={CONTROLLER_FROM_INSIDE},localhost,127.0.0.1\n")
        draft.rename(self.rootfs)

    def ensure_keys(self) -> None:
        """Generate the client key of the lab and the host key of this host, once each."""
        self.state.ssh.mkdir(parents=True, exist_ok=True)
        self.state.ssh.chmod(0o700)
        for path, comment in (
            (self.state.ssh / "id_ed25519", "vllm-turing lab"),
            (self.folder / "host_key", f"root@{self.name}"),
        ):
            if not path.is_file():
                argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment]
                self.runner([*argv, "-f", str(path)])

    def choose_port(self, wanted: int, *, asked: bool) -> int:
        """Return the SSH port: the wanted one if it is free, another unless it was asked for."""
        if wanted and mirrors.wait_free(wanted):
            return wanted
        if wanted and asked:
            raise LabError(
                f"The port '{wanted}' is taken by another program; choose another with --port."
            )
        used = {
            int(read_json(State(self.state.root).host(n) / "connection.json").get("port", 0))
            for n in self.state.host_names()
            if n != self.name
        }
        return mirrors.free_port(FIRST_PORT, used.__contains__)

    def write_connection(self, port: int, mirror_port: int) -> dict[str, Any]:
        """Write connection.json and known_hosts."""
        data = {
            "host": ADDRESS,
            "port": port,
            "user": image.ADMIN,
            "private_key": str(self.state.ssh / "id_ed25519"),
            "known_hosts": str(self.state.ssh / "known_hosts"),
            "mirror": mirrors.url_from_inside(mirror_port),
            "nvidia_key_fingerprint": archive.fingerprint(
                self.state, archive.NVIDIA_KEY, self.runner
            ),
        }
        write_json(self.connection_file, data)
        self.write_known_hosts()
        return data

    def write_known_hosts(self) -> None:
        """Write the host keys of all lab hosts where SSH clients look for them."""
        lines = []
        for name in self.state.host_names():
            folder = self.state.host(name)
            port = read_json(folder / "connection.json").get("port")
            key = (folder / "host_key.pub").read_text(encoding="ascii").split()
            lines.append(f"[{ADDRESS}]:{port} {key[0]} {key[1]}\n")
        if self.state.ssh.is_dir():
            (self.state.ssh / "known_hosts").write_text("".join(lines), encoding="ascii")

    def write_inventory(self) -> None:
        """Write the facts of all hosts for inventories."""
        hosts = {
            n: read_json(self.state.host(n) / "connection.json") for n in self.state.host_names()
        }
        mirror = next(iter(hosts.values()), {}).get("mirror", "")
        write_json(self.state.inventory_file, {"hosts": hosts, "mirror": mirror})

    def start(self, port: int, runtime: str, limits: controller.Limits) -> None:
        """Start the container."""
        self.remove_container()
        self.podman(
            "--runtime",
            runtime,
            "run",
            "--detach",
            "--name",
            self.container,
            "--hostname",
            self.name,
            "--systemd=always",
            "--privileged",
            # 'systemctl reboot' ends the container; this is what starts it again
            "--restart=always",
            "--ulimit",
            f"nofile={limits.nofile}:{limits.nofile}",
            "--ulimit",
            f"nproc={limits.nproc}:{limits.nproc}",
            "--network",
            "slirp4netns:allow_host_loopback=true",
            "--publish",
            f"{ADDRESS}:{port}:22",
            "--volume",
            f"{self.state.store}:{self.state.store}",
            "--shm-size",
            "4g",
            "--rootfs",
            str(self.rootfs),
            INIT,
            "boot",
            timeout=180,
        )

    def remove_container(self) -> None:
        """Stop and remove the container, if there is one."""
        if shutil.which("podman"):
            self.podman("rm", "--force", "--time", "5", "--ignore", self.container, check=False)

    def answers_ssh(self) -> bool:
        """Return whether the admin user gets in and the host has finished booting."""
        done = subprocess.run(
            self.ssh_command("true"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
        return done.returncode == 0

    def wait(self, progress: Progress) -> None:
        """Wait until the host answers over SSH."""
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            try:
                if self.answers_ssh():
                    progress(f"{self.name}: reachable")
                    return
            except subprocess.TimeoutExpired:
                continue
            time.sleep(0.2)
        log = self.podman("logs", "--tail", "3", self.container, check=False).strip()
        last = log.splitlines()[-1] if log else "no message"
        raise LabError(
            f"The lab host '{self.name}' does not answer on port "
            f"'{self.connection()['port']}' after {BOOT_SECONDS:.0f} seconds: {last}"
        )
