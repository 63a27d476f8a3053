"""Fabricated hosts: a folder of files, recorded outputs of commands, answers of web servers."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_turing import preflight
from vllm_turing.deb_packages import QUERY
from vllm_turing.gpu_facts import COMMANDS
from vllm_turing.nvidia_smi import QUERY_FIELDS
from vllm_turing.preflight_host import Answer, Host
from vllm_turing.preflight_wish import Wish
from vllm_turing.run import Result

SMI = Path(__file__).parents[2] / "fixtures" / "nvidia-smi"
TI = SMI / "rtx2080ti-x2-580.159.03"

KERNEL = "6.17.0-29-generic"
DRIVER = "580.159.03-0ubuntu0.24.04.1"
#: 2026-10-01: a date on which a healthy host might be looked at.
NOW = 1_790_812_800.0

SMI_XML, SMI_LINKS, SMI_TOPO, SMI_P2P, LSPCI = (argv for argv, _ in COMMANDS)
SMI_LIST = ("nvidia-smi", "-L")
SMI_QUERY = ("nvidia-smi", f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv,noheader")
DPKG = ("dpkg-query", "-W", f"-f={QUERY}")
DKMS = ("dkms", "status")

PREFIX = "/opt/vllm-turing"
MODEL = "/var/lib/vllm-turing/models/Q"
SITE = f"{PREFIX}/releases/abc/venv/lib/python3.12/site-packages"
UNIT = "/etc/systemd/system/vllm-turing.service"
HUB = "https://hub.example"
TREE = f"{HUB}/api/models/org/Q/tree/main?recursive=true"
SHARD = f"{HUB}/org/Q/resolve/main/model-00001-of-00002.safetensors"

DRIVER_PACKAGES = (
    "nvidia-driver-580", "nvidia-dkms-580", "nvidia-utils-580", "nvidia-compute-utils-580",
    "nvidia-kernel-common-580", "libnvidia-compute-580", "libnvidia-gl-580",
)  # fmt: skip


def safetensors(size: int = 64) -> bytes:
    """Return a whole safetensors file with one tensor."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\x01" * size


def packages(rows: Mapping[str, tuple[str, str]]) -> str:
    """Return dpkg-query's output: name to (version, state)."""
    return "".join(
        f"{name}\tamd64\t{version}\t{state}\n" for name, (version, state) in rows.items()
    )


HEALTHY_PACKAGES = {
    "base-files": ("13ubuntu10", "ii "),
    "libc6": ("2.39-0ubuntu8", "ii "),
    **dict.fromkeys(DRIVER_PACKAGES, (DRIVER, "hi ")),
}

HEALTHY_UNIT = f"""\
[Unit]
Description=vLLM
After=network-online.target nvidia-persistenced.service
Wants=network-online.target nvidia-persistenced.service
StartLimitIntervalSec=3600
StartLimitBurst=3
[Service]
Type=notify
User=vllm
Environment=CUDA_HOME=/usr/local/cuda-12.9
Environment=PATH={PREFIX}/current/venv/bin:/usr/local/cuda-12.9/bin:/usr/bin:/bin
Environment=PYTHONPATH={PREFIX}/current/src/FlashQLA
ExecStart={PREFIX}/current/venv/bin/python -m vllm.entrypoints.openai.api_server \\
  --host 127.0.0.1 --port 8000 --model {MODEL} \\
  --speculative-config '{{"method":"mtp","num_speculative_tokens":3}}'
Restart=on-failure
RestartSec=10
[Install]
WantedBy=multi-user.target
"""

PATCHED_HEADER = "// smem_mma_kv_base smem_per_mma_kv\n"
FLOOR = "        return capability >= DeviceCapability({}) and capability <= DeviceCapability(\n"


def dist(name: str, version: str) -> dict[str, str]:
    """Return the folder of an installed distribution."""
    return {f"{SITE}/{name.replace('-', '_')}-{version}.dist-info/METADATA": f"Name: {name}\n"}


#: The reference model's sizes (its document, and the public config of its family).
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "text_config": {
        "num_hidden_layers": 64, "full_attention_interval": 4, "hidden_size": 5120,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 17408, "vocab_size": 248320, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1,
    },
    "vision_config": {
        "hidden_size": 1152, "depth": 27, "intermediate_size": 4304, "out_hidden_size": 5120,
        "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
        "num_position_embeddings": 2304,
    },
}  # fmt: skip

HEALTHY_FILES: dict[str, str | bytes] = {
    "/etc/os-release": 'ID=ubuntu\nVERSION_ID="24.04"\nPRETTY_NAME="Ubuntu 24.04.4 LTS"\n',
    "/etc/passwd": (
        "root:x:0:0::/root:/bin/bash\n"
        "vllm:x:990:990::/var/lib/vllm-turing:/usr/sbin/nologin\n"
        "llm:x:1000:1000::/home/llm:/bin/bash\n"
    ),
    "/etc/environment": "no_proxy=localhost\n",
    "/etc/default/locale": "LANG=zh_CN.UTF-8\n",
    "/etc/ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n",
    "/etc/modprobe.d/blacklist-nouveau.conf": "blacklist nouveau\noptions nouveau modeset=0\n",
    "/etc/apt/sources.list.d/ubuntu.sources": (
        "Types: deb\nURIs: http://archive.example/ubuntu/\nSuites: noble\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n"
    ),
    "/usr/share/keyrings/ubuntu-archive-keyring.gpg": b"\x99key",
    "/proc/1/comm": "systemd\n",
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 ro quiet\n",
    "/proc/meminfo": "MemTotal:       49283072 kB\nMemFree: 1 kB\n",
    "/proc/locks": "",
    "/proc/net/tcp": "  sl  local_address rem_address   st\n",
    "/proc/driver/nvidia/version": (TI / "proc_version.txt").read_text(),
    "/sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    "/sys/firmware/acpi/tables/DSDT": "",
    "/sys/kernel/iommu_groups/0/type": "identity\n",
    f"/boot/vmlinuz-{KERNEL}": "kernel",
    f"/boot/initrd.img-{KERNEL}": "initrd",
    f"/lib/modules/{KERNEL}/build/Makefile": "",
    f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko.zst": "module",
    "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.03": "library",
    "/run/systemd/timesync/synchronized": "",
    **{f"/dev/{name}": "" for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")},
    "/dev/shm/keep": "",
    "/usr/bin/python3.12": "#!program",
    "/usr/bin/c++": "#!program",
    "/usr/include/python3.12/Python.h": "",
    "/usr/local/cuda-12.9/bin/nvcc": "#!program",
    "/usr/local/cuda-12.9/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.9.1"}}',
    f"{PREFIX}/releases/abc/release.json": "{}",
    f"{PREFIX}/releases/abc/venv/pyvenv.cfg": "home = /usr/bin\nversion = 3.12.3\nuv = 0.9\n",
    f"{PREFIX}/releases/abc/venv/bin/ninja": "#!program",
    f"{PREFIX}/releases/abc/src/FlashQLA/.git/HEAD": "ref: refs/heads/main\n",
    **dist("torch", "2.11.0+cu129"),
    **dist("vllm", "0.24.0+cu129"),
    **dist("flashinfer-python", "0.6.12"),
    **dist("flashinfer-cubin", "0.6.12"),
    **dist("nvidia-cuda-runtime-cu12", "12.9.79"),
    f"{SITE}/torch/version.py": "__version__ = '2.11.0+cu129'\ncuda: Optional[str] = '12.9'\n",
    f"{SITE}/vllm/v1/attention/backends/flashinfer.py": FLOOR.format("7, 5"),
    f"{SITE}/flashinfer/data/include/flashinfer/attention/prefill.cuh": PATCHED_HEADER,
    UNIT: HEALTHY_UNIT,
    f"{MODEL}/config.json": json.dumps(CONFIG),
    f"{MODEL}/model.safetensors.index.json": json.dumps(
        {"weight_map": {f"l.{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
    ),
    f"{MODEL}/model-00001-of-00002.safetensors": safetensors(),
    f"{MODEL}/model-00002-of-00002.safetensors": safetensors(),
}

HEALTHY_LINKS = {
    f"{PREFIX}/current": f"{PREFIX}/releases/abc",
    f"{PREFIX}/releases/abc/venv/bin/python3": "/usr/bin/python3.12",
    "/usr/local/cuda": "/etc/alternatives/cuda",
    "/etc/alternatives/cuda": "/usr/local/cuda-12.9",
}

PCI = (
    "0000:0a:00.0 VGA compatible controller [0300]: NVIDIA Corporation TU102 "
    "[GeForce RTX 2080 Ti Rev. A] [10de:1e07] (rev a1)\n"
    "\tSubsystem: NVIDIA Corporation Device [10de:12fa]\n"
    "\tKernel driver in use: {driver}\n\tKernel modules: nvidiafb, nouveau, nvidia\n"
    "0000:0a:00.1 Audio device [0403]: NVIDIA Corporation TU102 High Definition Audio "
    "Controller [10de:10f7] (rev a1)\n\tKernel driver in use: snd_hda_intel\n"
    "0000:0b:00.0 VGA compatible controller [0300]: NVIDIA Corporation TU102 "
    "[GeForce RTX 2080 Ti Rev. A] [10de:1e07] (rev a1)\n\tKernel driver in use: {driver}\n"
)


def ok(text: str) -> Result:
    """Return a command's good answer."""
    return Result((), 0, text)


HEALTHY_COMMANDS: dict[tuple[str, ...], Result] = {
    SMI_XML: ok((TI / "q.xml").read_text()),
    SMI_LINKS: ok((TI / "nvlink_s.txt").read_text()),
    SMI_TOPO: ok((TI / "topo_m.txt").read_text()),
    SMI_P2P: ok((TI / "topo_p2p.txt").read_text()),
    LSPCI: ok(PCI.format(driver="nvidia")),
    ("uname", "-r"): ok(f"{KERNEL}\n"),
    ("uname", "-m"): ok("x86_64\n"),
    ("lsmod",): ok("Module                  Size  Used by\nnvidia  1 2 nvidia_uvm\n"),
    DPKG: ok(packages(HEALTHY_PACKAGES)),
    DKMS: ok(f"nvidia/580.159.03, {KERNEL}, x86_64: installed\n"),
}

#: Free space and inodes of every fabricated file system.
ROOMY = os.statvfs_result((4096, 4096, 10**8, 10**8, 10**8, 10**7, 10**7, 10**7, 4096, 255))

FILES_OF_HUB = [
    {"type": "file", "path": "config.json", "size": 2},
    *(
        {"type": "file", "path": f"model-0000{i}-of-00002.safetensors", "size": 135,
         "lfs": {"size": 14 * 10**9}}
        for i in (1, 2)
    ),
]  # fmt: skip

HEALTHY_WEB: dict[str, Answer] = {
    TREE: Answer(200, {}, json.dumps(FILES_OF_HUB).encode()),
    SHARD: Answer(302, {"location": "https://cdn.example/blob?sig=1"}),
    "https://cdn.example/blob?sig=1": Answer(200, {"content-length": "14000000000"}),
    "https://pypi.example/simple/uv/": Answer(200),
    "http://archive.example/ubuntu/dists/noble/InRelease": Answer(200),
    "https://nvidia.example/apt/InRelease": Answer(200),
    "https://torch.example/whl/cu129/torch/": Answer(200),
    "https://vllm.example/": Answer(200),
    "https://git.example/": Answer(404),
}

WISH: dict[str, Any] = {
    "vllm_host_mirror_hub": HUB,
    "vllm_host_mirror_python": "https://pypi.example/simple",
    "vllm_host_mirror_nvidia": "https://nvidia.example/apt",
    "vllm_host_mirror_pytorch": "https://torch.example/whl",
    "vllm_host_mirror_vllm": "https://vllm.example",
    "vllm_host_mirror_git": "https://git.example",
    "hf_model_repo": "org/Q",
    "hf_model_path": MODEL,
}

#: The part of a stack that the checks read.
STACK: dict[str, Any] = {
    "python": ["3.12"],
    "cuda": {"toolkit": "12.9", "torch_tag": "cu129"},
    "versions": {
        "vllm": "0.24.0+cu129", "torch": "2.11.0+cu129",
        "flashinfer-python": "0.6.12", "flashinfer-cubin": "0.6.12",
    },
    "forbidden": ["flashinfer-jit-cache"],
    "build_tools": ["nvcc", "ninja", "c++", "Python.h"],
    "indexes": [{"name": "pytorch", "url": ""}, {"name": "vllm", "url": ""}],
}  # fmt: skip


@dataclass
class Box:
    """What a host is fabricated from; None in ``files``, ``commands``, ``web`` takes away."""

    root: Path
    files: dict[str, str | bytes | None] = field(default_factory=dict)
    links: dict[str, str | None] = field(default_factory=dict)
    commands: dict[tuple[str, ...], Result | None] = field(default_factory=dict)
    web: dict[str, Answer | None] = field(default_factory=dict)
    wish: dict[str, Any] = field(default_factory=dict)
    stack: dict[str, Any] = field(default_factory=lambda: dict(STACK))
    owners: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    statvfs: os.statvfs_result = ROOMY
    uid: int = 0
    site: bool = False
    base: str = "healthy"
    now: float = NOW

    def host(self) -> Host:
        """Write the files and return the view of them."""
        healthy = self.base == "healthy"
        files = {**(HEALTHY_FILES if healthy else FRESH_FILES), **self.files}
        links = {**(HEALTHY_LINKS if healthy else {}), **self.links}
        commands = {**(HEALTHY_COMMANDS if healthy else FRESH_COMMANDS), **self.commands}
        web = {**HEALTHY_WEB, **({} if healthy else FRESH_WEB), **self.web}
        shutil.rmtree(self.root, ignore_errors=True)
        for name, content in files.items():
            if content is None:
                continue
            path = self.root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            if content in ("#!program", b"#!program"):
                path.chmod(0o755)
            os.utime(path, (NOW - 1000, NOW - 1000))
        for name, target in links.items():
            if target is not None:
                path = self.root / name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(target)
        for name, time in self.times.items():
            os.utime(self.root / name.lstrip("/"), (time, time))

        def runner(argv: Sequence[str], **_: Any) -> Result:
            found = commands.get(tuple(argv))
            return found if found is not None else Result(tuple(argv), None, error="not found")

        def fetch(method: str, url: str, **_: Any) -> Answer:
            found = web.get(url)
            return found if found is not None else Answer(error="Name or service not known")

        owners = {MODEL: (990, 990, 0o755), "/var/lib/vllm-turing": (990, 990, 0o755),
                  **self.owners}  # fmt: skip
        return Host(
            self.root, runner, fetch=fetch, statvfs=lambda _: self.statvfs, uid=self.uid,
            owners=owners, clock=lambda: self.now,
        )  # fmt: skip

    def report(self, **options: Any) -> dict[str, Any]:
        """Run the checks on it and return the report."""
        wish = Wish({**WISH, **self.wish}, self.site, self.stack)
        return preflight.run_checks(self.host(), wish, **options).as_dict()

    def statuses(self, **options: Any) -> dict[str, str]:
        """Run the checks and return id to status."""
        return {row["id"]: row["status"] for row in self.report(**options)["checks"]}


#: A box right after the installation of Ubuntu: cards, nouveau, no driver, nothing of ours.
FRESH_FILES: dict[str, str | bytes] = {
    name: content
    for name, content in HEALTHY_FILES.items()
    if not name.startswith((PREFIX, MODEL, UNIT, "/dev/nvidia", "/usr/local", "/proc/driver"))
    and "libnvidia" not in name
    and "nvidia.ko" not in name
    and "blacklist" not in name
} | {"/etc/passwd": "root:x:0:0::/root:/bin/bash\n"}

FRESH_COMMANDS: dict[tuple[str, ...], Result] = {
    name: result
    for name, result in HEALTHY_COMMANDS.items()
    if name[0] not in ("nvidia-smi", "dkms")
} | {
    DPKG: ok(packages({"base-files": ("13ubuntu10", "ii "), "libc6": ("2.39", "ii ")})),
    LSPCI: ok(PCI.format(driver="nouveau")),
    ("lsmod",): ok("Module Size Used by\nnouveau 3096576 0\n"),
}  # fmt: skip

#: Where the model is not on the host yet, its config comes from the Hub.
FRESH_WEB: dict[str, Answer] = {
    f"{HUB}/org/Q/resolve/main/config.json": Answer(200, {}, json.dumps(CONFIG).encode()),
}
