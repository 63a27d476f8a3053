"""A box made of recorded command outputs and a folder tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_turing import nvidia_driver
from vllm_turing.apt_client import Apt
from vllm_turing.apt_source import Source
from vllm_turing.run import Result

KERNEL = "6.17.0-29-generic"
V159 = "580.159.03-0ubuntu0.24.04.1"
V173 = "580.173.02-0ubuntu0.24.04.1"
V159_NVIDIA = "580.159.04-1ubuntu1"
UBUNTU = "http://archive.ubuntu.com/ubuntu noble-updates/restricted amd64 Packages"
NVIDIA = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64  Packages"
COMPUTE = [
    "libnvidia-cfg1-580",
    "libnvidia-compute-580",
    "nvidia-compute-utils-580",
    "nvidia-dkms-580",
    "nvidia-kernel-common-580",
    "nvidia-kernel-source-580",
    "nvidia-utils-580",
]
KERNEL_PACKAGES = [
    ("linux-generic-hwe-24.04", "6.17.0-29.29~24.04.1"),
    ("linux-image-generic-hwe-24.04", "6.17.0-29.29~24.04.1"),
    (f"linux-image-{KERNEL}", "6.17.0-29.29~24.04.1"),
    (f"linux-headers-{KERNEL}", "6.17.0-29.29~24.04.1"),
]
POLICY_FILES = f"""\
Package files:
 100 /var/lib/dpkg/status
     release a=now
 500 {UBUNTU}
     release v=24.04,o=Ubuntu,a=noble-updates,n=noble,l=Ubuntu,c=restricted,b=amd64
     origin archive.ubuntu.com
 100 {NVIDIA}
     release o=NVIDIA,l=NVIDIA CUDA,c=
     origin developer.download.nvidia.com
Pinned packages:
"""


@dataclass
class Box:
    """A host: what its commands answer, and its files below ``root``.

    :ivar packages: name to (version, two-letter state)
    :ivar offers: name to [(version, index line)]
    :ivar simulations: what apt-get -s answers, by a word of its arguments; the rest is computed
    :ivar answers: other commands' results, by their first words
    """

    root: Path
    packages: dict[str, tuple[str, str]] = field(default_factory=dict)
    offers: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    simulations: dict[str, Result] = field(default_factory=dict)
    answers: dict[str, Result] = field(default_factory=dict)
    ran: list[list[str]] = field(default_factory=list)
    kernel: str = KERNEL
    # What a transaction or apt-mark does to `packages`; off for tests that only plan.
    live: bool = False

    def __call__(self, argv: Sequence[str], **_options: Any) -> Result:
        words = [str(word) for word in argv]
        self.ran.append(words)
        line = " ".join(words)
        for start, result in self.answers.items():
            if line.startswith(start):
                return Result(tuple(words), result.rc, result.stdout, result.stderr, result.error)
        if words[0] == "dpkg-query":
            text = "".join(
                f"{n}\tamd64\t{v}\t{s} \n" for n, (v, s) in sorted(self.packages.items())
            )
            return Result(tuple(words), 0, text)
        if words[:2] == ["uname", "-r"]:
            return Result(tuple(words), 0, f"{self.kernel}\n")
        if words[0] == "apt-cache" and words[-1] == "policy":
            return Result(tuple(words), 0, POLICY_FILES)
        if words[0] == "apt-cache" and "policy" in words:
            return Result(tuple(words), 0, self._policy(words[words.index("policy") + 1 :]))
        if words[0] == "apt-get" and "install" in words:
            return self._transaction(words)
        if words[0] == "apt-get" and "purge" in words:
            for name in words[words.index("purge") + 1 :]:
                self.packages.pop(name, None)
            return Result(tuple(words), 0)
        if words[0] == "apt-mark":
            return self._mark(words)
        if words[0] == "apt-get":
            return Result(tuple(words), 0)
        return Result(tuple(words), None, error="not found")

    def _policy(self, names: Iterable[str]) -> str:
        text = ""
        for name in names:
            if name not in self.offers and name not in self.packages:
                continue
            text += f"{name}:\n  Installed: (none)\n  Candidate: x\n  Version table:\n"
            for version, index in self.offers.get(name, []):
                text += f"     {version} 500\n        500 {index}\n"
        return text

    def _transaction(self, words: list[str]) -> Result:
        arguments = words[words.index("install") + 1 :]
        simulated = "-s" in words
        for word, result in self.simulations.items():
            if any(word in argument for argument in arguments):
                return Result(tuple(words), result.rc, result.stdout, result.stderr)
        text = ""
        for argument in arguments:
            if argument.startswith("--"):
                continue
            if argument.endswith("-"):
                name = argument[:-1]
                text += f"Purg {name} [{self.packages[name][0]}]\n"
                if not simulated and self.live:
                    del self.packages[name]
                continue
            if argument.endswith(".deb"):
                name, version = Path(argument).name.split("_")[:2]
            else:
                name, _, version = argument.partition("=")
                version = version or self.offers[name][0][0]
            old = self.packages.get(name)
            if old is None or old[0] != version:
                was = f" [{old[0]}]" if old else ""
                text += f"Inst {name}{was} ({version} Ubuntu:24.04/noble-updates [amd64])\n"
                text += f"Conf {name} ({version} Ubuntu:24.04/noble-updates [amd64])\n"
            if not simulated and self.live:
                self.packages[name] = (version, "ii")
        return Result(tuple(words), 0, text)

    def _mark(self, words: list[str]) -> Result:
        for name in words[2:]:
            version, state = self.packages[name]
            self.packages[name] = (version, ("h" if words[1] == "hold" else "i") + state[1:])
        return Result(tuple(words), 0)

    def commands(self, *start: str) -> list[list[str]]:
        """Commands that began with the given words."""
        return [words for words in self.ran if words[: len(start)] == list(start)]

    def write(self, path: str, text: str = "") -> Path:
        """Put a file into the box."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target


def healthy_kernel(box: Box, version: str | None, kernel: str = KERNEL) -> None:
    """Give the box a kernel, its headers and a built module."""
    box.write(f"/boot/vmlinuz-{kernel}")
    (box.root / f"lib/modules/{kernel}/build").mkdir(parents=True, exist_ok=True)
    if version:
        path = box.write(f"/lib/modules/{kernel}/updates/dkms/nvidia.ko")
        box.answers[f"modinfo {path}"] = Result(
            (), 0, f"filename: {path}\nversion:        {version}\nlicense:        NVIDIA\n"
        )


def loaded(box: Box, version: str) -> None:
    """Load a module."""
    box.write(
        "/proc/driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Mar  3 10:11:12 2026\n",
    )


def library(box: Box, version: str) -> None:
    """Put an NVML library on the disk."""
    box.write(f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version}")
    link = box.root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    link.unlink(missing_ok=True)
    link.symlink_to(f"libnvidia-ml.so.{version}")


def offered(box: Box, *versions: tuple[str, str], kernel: str = KERNEL) -> None:
    """Let the sources offer driver versions, each as (version, index line)."""
    names = [
        *COMPUTE,
        "nvidia-driver-580",
        "nvidia-dkms-580-open",
        "nvidia-kernel-source-580-open",
        "nvidia-driver-580-open",
    ]
    for name in names:
        box.offers[name] = list(versions)
    box.offers[f"linux-headers-{kernel}"] = [("6.17.0-29.29~24.04.1", UBUNTU)]


def installed(box: Box, version: str = V159, *, state: str = "ii") -> None:
    """Install the compute part of a driver, and the kernel's packages."""
    for name in COMPUTE:
        box.packages[name] = (version, state)
    for name, kernel_version in KERNEL_PACKAGES:
        box.packages[name] = (kernel_version, state)


def wish(**over: Any) -> nvidia_driver.Wish:
    """The role's defaults, with NVIDIA's repository already known to the host."""
    values: dict[str, Any] = {
        "version": "580.159.03",
        "sources": [Source("ubuntu", "Ubuntu"), Source("nvidia", "NVIDIA")],
        "state_dir": "/var/lib/vllm-turing",
        "cache_dir": "/var/cache/vllm-turing/driver",
    }
    return nvidia_driver.Wish(**{**values, **over})


def host(box: Box, wanted: nvidia_driver.Wish) -> nvidia_driver.Host:
    """Read the box as the module does, without waiting for locks."""
    apt = Apt(box, wait_for_lock=lambda _timeout: 0.0, sleep=lambda _seconds: None)
    return nvidia_driver.read_host(wanted, box, box.root, apt=apt)


def plan(box: Box, **over: Any) -> nvidia_driver.Plan:
    """Plan for the box."""
    wanted = wish(**over)
    return nvidia_driver.make_plan(wanted, host(box, wanted))


def record(box: Box, **fields: Any) -> None:
    """Write the record that an earlier run left."""
    values: Mapping[str, Any] = {
        "requested": "580.159.03",
        "resolved": "580.159.03",
        "package_version": V159,
        "source": "ubuntu",
        "difference": "",
        "flavour": "proprietary",
        "held": [],
        "complete": True,
    }
    nvidia_driver.Record("/var/lib/vllm-turing", box.root).write({**values, **fields})
