"""One fabricated host per reported failure: which check says so, and in which words."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.unit.preflight import fabricated as f
from tests.unit.preflight.fabricated import Box, ok, packages
from vllm_turing.preflight_host import Answer
from vllm_turing.run import Result

REAL_UNIT = "/etc/systemd/system/vllm-main.service"
XML = (f.TI / "q.xml").read_text()

#: The reference host's own unit, shortened to what the checks read.
HANDMADE = """\
[Unit]
Description=stable server
After=network-online.target
Wants=network-online.target
[Service]
Type=simple
User=llm
Environment=CUDA_HOME=/usr/local/cuda
Environment=PATH=/usr/local/cuda/bin:/home/llm/venv/bin:/usr/bin:/bin
Environment=LD_LIBRARY_PATH=/usr/local/cuda/lib64:/usr/local/cuda/lib64/stubs
ExecStart=/home/llm/venv/bin/python -m vllm.entrypoints.openai.api_server \\
  --host 0.0.0.0 --port 8001 --model /home/llm/models/Q \\
  --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
Restart=always
RestartSec=10
TimeoutStartSec=900
StandardOutput=append:/home/llm/vllm-main-8000.log
[Install]
WantedBy=multi-user.target
"""


def unit(**changes: str) -> dict[str, Any]:
    """Return the healthy unit with lines replaced (old to new)."""
    text = f.HEALTHY_UNIT
    for old, new in changes.items():
        text = text.replace(old, new)
    return {f.UNIT: text}


def pkgs(**rows: tuple[str, str] | None) -> dict[Any, Any]:
    """Return dpkg's answer for the healthy host with packages changed; ``_`` stands for ``-``."""
    table = dict(f.HEALTHY_PACKAGES)
    for name, row in rows.items():
        name = name.replace("_", "-")
        if row is None:
            table.pop(name, None)
        else:
            table[name] = row
    return {f.DPKG: ok(packages(table))}


def smi(rc: int | None, stdout: str = "", stderr: str = "", error: str | None = None) -> Any:
    """Return the same answer for every call of nvidia-smi."""
    calls = (f.SMI_XML, f.SMI_LINKS, f.SMI_TOPO, f.SMI_P2P, f.SMI_LIST, f.SMI_QUERY)
    return {call: Result(call, rc, stdout, stderr, error) for call in calls}


ONE_CARD = XML[: XML.index('\t<gpu id="00000000:0B')] + "</nvidia_smi_log>"
LOST = "Unable to determine the device handle for GPU1: 0000:0B:00.0: Unknown Error\n"
MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n"
)
NO_MODULE = {"/proc/driver/nvidia/version": None}
USER_SITE = "/var/lib/vllm-turing/.local/lib/python3.12/site-packages"
CUDA_SOURCE = "/etc/apt/sources.list.d/cuda.list"
CUDA_URL = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/"
KEYRING = "/usr/share/keyrings/cuda-archive-keyring.gpg"
SIGNED = f"deb [signed-by={KEYRING}] {CUDA_URL} /\n"
OTHER_KERNEL = "6.17.0-28-generic"
LOCK_LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:0000000000000000000000000000000000000000000000000000000000000000\n"
    b"size 2415919104\n"
)
COMPUTE = """<processes><process_info><pid>{pid}</pid><type>C</type>
<process_name>{name}</process_name><used_memory>20280 MiB</used_memory>
</process_info></processes>"""


def busy(pid: str = "4711", name: str = "VLLM::Worker_TP") -> dict[Any, Any]:
    """Return the document with a compute process on the first card."""
    text = XML.replace("<processes>\n\t\t</processes>", COMPUTE.format(pid=pid, name=name), 1)
    return {f.SMI_XML: ok(text)}


def proc(pid: int, comm: str, uid: int, cgroup: str) -> dict[str, str]:
    """Return the files of a process."""
    return {
        f"/proc/{pid}/comm": f"{comm}\n",
        f"/proc/{pid}/status": f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n",
        f"/proc/{pid}/cgroup": f"0::{cgroup}\n",
    }


EFI = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
SB_ON = b"\x06\x00\x00\x00\x01"
DKMS_ONLY = {
    **NO_MODULE,
    EFI: SB_ON,
}
MOK = ("mokutil", "--test-key", "/var/lib/shim-signed/mok/MOK.der")

# (name, what the host is made of, {check: status}, words that the findings hold)
CASES: list[tuple[str, dict[str, Any], dict[str, str], list[str]]] = [
    (
        "1 libraries replaced under the module",
        {
            "files": {
                "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.03": None,
                "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.173.02": "library",
                "/var/log/apt/history.log": (
                    "Commandline: /usr/bin/unattended-upgrade\n"
                    "Upgrade: libnvidia-compute-580:amd64 (580.159.03-0, 580.173.02-0)\n"
                ),
            },
            "commands": {
                **smi(18, MISMATCH),
                **pkgs(libnvidia_compute_580=("580.173.02-0ubuntu0.24.04.1", "ii ")),
                ("systemctl", "is-active", "vllm-turing.service"): ok("active\n"),
            },
        },
        {"driver_mismatch": "fail", "driver_answers": "fail", "driver_packages": "fail"},
        ["580.159.03", "580.173.02", "unattended-upgrades", "reboot", "vllm-turing.service"],
    ),
    (
        "3a DKMS without headers",
        {
            "files": {
                **NO_MODULE,
                f"/lib/modules/{f.KERNEL}/build/Makefile": None,
                f"/lib/modules/{f.KERNEL}/updates/dkms/nvidia.ko.zst": None,
                f"/lib/modules/{f.KERNEL}/modules.dep": "",
            },
            "commands": {
                **smi(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA "
                         "driver."),
                **pkgs(nvidia_dkms_580=(f.DRIVER, "iF "), nvidia_driver_580=(f.DRIVER, "iU ")),
                f.DKMS: ok(f"nvidia/580.159.03, {OTHER_KERNEL}, x86_64: installed\n"),
            },
        },
        {"dpkg_state": "fail", "driver_module": "fail", "kernel_headers": "fail",
         "kernel_next": "fail", "driver_dkms": "fail"},
        ["linux-headers-6.17.0-29-generic", "no nvidia module for the running kernel",
         "dkms autoinstall -k", "dpkg --configure -a"],
    ),
    (
        "3b DKMS whose build failed",
        {
            "files": {
                **NO_MODULE,
                f"/lib/modules/{f.KERNEL}/updates/dkms/nvidia.ko.zst": None,
                "/var/lib/dkms/nvidia/580.159.03/build/make.log": "error: implicit declaration\n",
            },
            "commands": {
                **smi(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA "
                         "driver."),
                **pkgs(nvidia_dkms_580=(f.DRIVER, "iF ")),
                f.DKMS: ok("nvidia, 580.159.03, 6.17.0-28-generic, x86_64: built\n"),
            },
        },
        {"dpkg_state": "fail", "driver_module": "fail"},
        ["/var/lib/dkms/nvidia/580.159.03/build/make.log"],
    ),
    (
        "5 nouveau owns the cards",
        {
            "files": {**NO_MODULE, "/etc/modprobe.d/blacklist-nouveau.conf": None},
            "commands": {
                **smi(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA "
                         "driver."),
                f.LSPCI: ok(f.PCI.format(driver="nouveau")),
                ("lsmod",): ok("Module Size\nnouveau 3096576 0\n"),
                ("dmesg",): ok("NVRM: The NVIDIA probe routine was not called for 2 device(s).\n"),
            },
        },
        {"nouveau": "fail", "driver_answers": "fail", "gpu_usable": "fail"},
        ["nouveau owns 2 of 2 cards", "update-initramfs -u", "reboot"],
    ),
    (
        "7a Secure Boot with a key that is not enrolled",
        {
            "files": DKMS_ONLY,
            "commands": {
                **smi(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA "
                         "driver."),
                MOK: Result(MOK, 1, "MOK.der is not enrolled"),
                ("dmesg",): ok("modprobe: nvidia: Key was rejected by service\n"),
            },
        },
        {"secure_boot": "fail", "driver_module": "fail"},
        ["mokutil --import", "signed modules", "firmware", "see secure_boot"],
    ),
    (
        "7a Secure Boot with an enrolled key",
        {"files": DKMS_ONLY, "commands": {MOK: Result(MOK, 1, "MOK.der is already enrolled")}},
        {"secure_boot": "pass"},
        [],
    ),
    (
        "7b mokutil is not installed and the firmware does not tell",
        {"files": {"/sys/firmware/efi/runtime": "", "/sys/firmware/acpi/tables/DSDT": ""}},
        {"secure_boot": "warn"},
        ["is unknown", "/sys/firmware/efi/efivars/SecureBoot-"],
    ),
    (
        "7c no EFI variables",
        {
            "files": {"/sys/firmware/efi/runtime": ""},
            "commands": {
                ("mokutil", "--sb-state"): Result(
                    (), 1, "", "EFI variables are not supported on this system\n"
                )
            },
        },
        {"secure_boot": "pass"},
        [],
    ),
    (
        "7d Secure Boot is off",
        {
            "files": {"/sys/firmware/efi/runtime": ""},
            "commands": {("mokutil", "--sb-state"): ok("SecureBoot disabled\n")},
        },
        {"secure_boot": "pass"},
        [],
    ),
    (
        "8 the wanted branch is a transitional package",
        {
            "wish": {"nvidia_driver_version": "570.195.03"},
            "commands": {
                ("apt-cache", "show", "nvidia-driver-570"): ok(
                    "Package: nvidia-driver-570\nDepends: nvidia-driver-580\n"
                    "Description-en: Transitional package for nvidia-driver-580\n"
                )
            },
        },
        {"driver_branch": "fail", "driver_version": "warn", "driver_packages": "fail"},
        ["branch 570 is now a transitional package for 580", "nvidia_driver_version"],
    ),
    (
        "9 held packages of another branch",
        {
            "commands": pkgs(
                nvidia_driver_535=("535.274.02-0ubuntu1", "hi "),
                libnvidia_compute_535=("535.274.02-0ubuntu1", "ii "),
                nvidia_kernel_common_470=("470.1-0", "rc "),
            )
        },
        {"driver_packages": "fail"},
        ["nvidia-driver-535", "apt-mark unhold nvidia-driver-535", "nvidia-kernel-common-470"],
    ),
    (
        "11a the same repository with and without a key",
        {
            "files": {
                CUDA_SOURCE: f"deb {CUDA_URL} /\n",
                "/etc/apt/sources.list.d/cuda-ubuntu2404-x86_64.list": SIGNED,
                KEYRING: b"key",
            }
        },
        {"apt_sources": "fail"},
        ["cuda.list:1", "cuda-ubuntu2404-x86_64.list:1", "Signed-By"],
    ),
    (
        "11b one of the two is deb822, without the slash",
        {
            "files": {
                CUDA_SOURCE: SIGNED,
                KEYRING: b"key",
                "/etc/apt/sources.list.d/cuda.sources": (
                    f"Types: deb\nURIs: {CUDA_URL.rstrip('/')}\nSuites: /\nSigned-By: /other.gpg\n"
                ),
                "/other.gpg": b"key",
            }
        },
        {"apt_sources": "fail"},
        ["cuda.sources:1"],
    ),
    (
        "11c the same key twice",
        {
            "files": {
                CUDA_SOURCE: SIGNED,
                "/etc/apt/sources.list.d/cuda-two.list": SIGNED,
                KEYRING: b"key",
            }
        },
        {"apt_sources": "warn"},
        ["declared twice"],
    ),
    (
        "11d e disabled, or only a saved copy",
        {
            "files": {
                CUDA_SOURCE + ".save": f"deb {CUDA_URL} /\n",
                "/etc/apt/sources.list.d/off.sources": (
                    f"Enabled: no\nTypes: deb\nURIs: {CUDA_URL}\nSuites: /\n"
                ),
                "/etc/apt/sources.list.d/good.list": SIGNED,
                KEYRING: b"key",
            }
        },
        {"apt_sources": "pass"},
        [],
    ),
    (
        "12 key missing, and a local repository that is gone",
        {
            "files": {
                CUDA_SOURCE: SIGNED,
                "/etc/apt/sources.list.d/cuda-local.list": (
                    "deb file:/var/cuda-repo-ubuntu2404-12-4-local /\n"
                ),
            }
        },
        {"apt_sources": "fail"},
        ["key missing", "cuda-repo-ubuntu2404-12-4"],
    ),
    (
        "14 a driver of the .run installer",
        {
            "base": "fresh",
            "files": {
                "/usr/bin/nvidia-uninstall": "#!program",
                "/var/log/nvidia-installer.log": "version 590.48.01\n",
                "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.590.48.01": "library",
            },
            "commands": {
                f.DKMS: ok(f"nvidia/590.48.01, {f.KERNEL}, x86_64: installed\n"),
            },
        },
        {"driver_runfile": "fail", "driver_version": "warn"},
        ["driver 590.48.01 was installed by the .run installer", "nvidia-uninstall"],
    ),
    (
        "16 a card without a number for its memory",
        {
            "commands": {
                f.SMI_XML: ok(
                    XML[: XML.index('\t<gpu id="00000000:0B')]
                    + XML[XML.index('\t<gpu id="00000000:0B') :].replace(
                        "<total>22528 MiB</total>", "<total>[Unknown Error]</total>"
                    )
                )
            }
        },
        {"gpu_memory": "fail", "gpu_cards": "pass"},
        ["GPU 1 (0000:0b:00.0) does not tell its memory"],
    ),
    (
        "16 MIG is on",
        {
            "commands": {
                f.SMI_XML: ok(
                    XML.replace("<current_mig>N/A</current_mig>",
                                "<current_mig>Enabled</current_mig>", 1)
                )
            }
        },
        {"gpu_mode": "fail"},
        ["MIG is on for GPU 0", "not supported here"],
    ),
    (
        "17a a card fell off the bus",
        {
            "commands": {
                f.SMI_XML: Result((), 255, LOST),
                f.SMI_QUERY: Result((), 255, LOST),
                f.SMI_LIST: Result(
                    (), 255, "GPU 0: NVIDIA GeForce RTX 2080 Ti (UUID: GPU-1111)\n" + LOST
                ),
                ("dmesg",): ok(
                    "NVRM: Xid (PCI:0000:0b:00): 79, GPU has fallen off the bus.\n"
                ),
            }
        },
        {"gpu_usable": "fail", "gpu_cards": "fail"},
        ["1 of 2 PCI devices usable", "0000:0b:00.0", "cold start", "79, GPU has fallen"],
    ),
    (
        "17b a third card that the open module does not support",
        {
            "commands": {
                f.LSPCI: ok(
                    f.PCI.format(driver="nvidia")
                    + "0000:02:00.0 VGA compatible controller [0300]: NVIDIA Corporation GP104 "
                    "[GeForce GTX 1070] [10de:1b81]\n"
                ),
                ("dmesg",): ok("NVRM: installed in this system is not supported by open\n"),
            }
        },
        {"gpu_usable": "warn", "gpu_cards": "pass"},
        ["2 of 3 PCI devices usable", "0000:02:00.0", "nvidia_driver_flavour"],
    ),
    (
        "18a no devices, with status 0",
        {"commands": smi(0, "No devices were found\n")},
        {"driver_answers": "fail", "gpu_usable": "fail"},
        ["nvidia-smi finds no device"],
    ),
    (
        "18b no supported device",
        {"commands": smi(255, "Failed to initialize NVML: No supported GPUs were found\n")},
        {"driver_answers": "fail"},
        ["the driver supports none of the cards"],
    ),
    (
        "18c the module is not loaded",
        {
            "files": NO_MODULE,
            "commands": smi(9, "NVIDIA-SMI has failed because it couldn't communicate with the "
                               "NVIDIA driver. Make sure..."),
        },
        {"driver_answers": "fail", "driver_module": "fail"},
        ["the kernel module is not loaded", "modprobe nvidia"],
    ),
    (
        "18d nvidia-smi is not installed",
        {"commands": {**smi(None, error="not found")}},
        {"driver_answers": "fail"},
        ["nvidia-smi is not installed"],
    ),
    (
        "18e nothing at all",
        {"commands": smi(0, "")},
        {"driver_answers": "fail"},
        ["does not say why"],
    ),
    (
        "20 another card has a lower number",
        {
            "commands": {
                f.SMI_XML: ok(
                    XML.replace("<product_architecture>Turing", "<product_architecture>Pascal", 1)
                    .replace("1E0710DE", "1D0110DE", 1)
                    .replace("22528 MiB", "2048 MiB", 1)
                    .replace("GeForce RTX 2080 Ti", "GeForce GT 1030", 1)
                )
            }
        },
        {"gpu_chosen": "fail", "gpu_memory": "fail", "gpu_cards": "fail"},
        ["0 is NVIDIA GeForce GT 1030", "device-ids"],
    ),
    (
        "20 CUDA_VISIBLE_DEVICES reorders",
        {
            "files": {
                **unit(**{"User=vllm": "User=vllm\nEnvironmentFile=/etc/vllm.env"}),
                "/etc/vllm.env": "CUDA_VISIBLE_DEVICES=1,0\n",
            }
        },
        {"gpu_chosen": "warn"},
        ["CUDA_VISIBLE_DEVICES='1,0'", "/etc/vllm.env:1"],
    ),
    (
        "21 nvidia-smi hangs",
        {"commands": smi(None, error="timed out after 15 s")},
        {"driver_answers": "fail", "gpu_usable": "fail", "dpkg_state": "pass"},
        ["timed out after 15 s", "bridge", "persistenced", "reboot"],
    ),
    (
        "21 only the topology hangs",
        {"commands": {f.SMI_TOPO: Result((), None, error="timed out after 15 s")}},
        {"driver_answers": "warn", "gpu_topology": "warn", "gpu_cards": "pass"},
        ["timed out after 15 s", "bridge"],
    ),
    (
        "22 one of two links is down",
        {
            "commands": {
                f.SMI_LINKS: ok(
                    (f.TI / "nvlink_s.txt").read_text().replace(
                        "Link 1: 25.781 GB/s", "Link 1: <inactive>"
                    )
                ),
                f.SMI_TOPO: ok((f.TI / "topo_m.txt").read_text().replace("NV2", "NV1")),
            }
        },
        {"nvlink_links": "warn", "gpu_topology": "warn"},
        ["Link 1 inactive on GPU 0 and 1 (NV1 instead of NV2)"],
    ),
    (
        "24a stubs on the library path",
        {
            "files": {
                **unit(**{"User=vllm": "User=vllm\nEnvironment=LD_LIBRARY_PATH="
                          "/usr/local/cuda/lib64:/usr/local/cuda/lib64/stubs"}),
                "/usr/local/cuda-12.9/lib64/stubs/libcuda.so": "stub",
            }
        },
        {"cuda_stubs": "warn"},
        ["/usr/local/cuda/lib64/stubs", "vllm-turing.service:10"],
    ),
    (
        "24b the stub would be loaded",
        {
            "files": {
                **unit(**{"User=vllm": "User=vllm\nEnvironment=LD_LIBRARY_PATH="
                          "/usr/local/cuda/lib64/stubs"}),
                "/usr/local/cuda-12.9/lib64/stubs/libcuda.so.1": "stub",
            }
        },
        {"cuda_stubs": "fail"},
        ["libcuda.so.1 would be loaded"],
    ),
    (
        "24c in a drop-in",
        {
            "files": {
                f"{f.UNIT}.d/env.conf": (
                    '[Service]\nEnvironment="LD_LIBRARY_PATH=/x/targets/x86_64-linux/lib/stubs"\n'
                )
            }
        },
        {"cuda_stubs": "warn"},
        ["vllm-turing.service.d/env.conf:2"],
    ),
    (
        "24d in an EnvironmentFile",
        {
            "files": {
                **unit(**{"User=vllm": "User=vllm\nEnvironmentFile=-/etc/vllm.env"}),
                "/etc/vllm.env": "A=1\nLD_LIBRARY_PATH=/usr/local/cuda/lib64/stubs\n",
            }
        },
        {"cuda_stubs": "warn"},
        ["/etc/vllm.env:2"],
    ),
    (
        "26 the link moved to another major release",
        {
            "files": {
                **unit(**{"CUDA_HOME=/usr/local/cuda-12.9": "CUDA_HOME=/usr/local/cuda"}),
                "/usr/local/cuda-13.0/version.json": '{"cuda":{"version":"13.0.1"}}',
                "/usr/local/cuda-13.0/bin/nvcc": "#!program",
            },
            "links": {"/etc/alternatives/cuda": "/usr/local/cuda-13.0"},
        },
        {"cuda_link": "fail", "cuda_home": "warn"},
        ["CUDA 13.0, the stack needs 12.9", "/usr/local/cuda-12.9"],
    ),
    (
        "26c the link dangles",
        {"links": {"/etc/alternatives/cuda": "/usr/local/cuda-12.8"}},
        {"cuda_link": "fail"},
        ["dangling"],
    ),
    (
        "26d same major release, and b a real folder",
        {
            "files": {
                **unit(**{"CUDA_HOME=/usr/local/cuda-12.9": "CUDA_HOME=/usr/local/cuda"}),
                "/usr/local/cuda/version.json": '{"cuda":{"version":"12.8.1"}}',
                "/usr/local/cuda/bin/nvcc": "#!program",
            },
            "links": {"/usr/local/cuda": None},
        },
        {"cuda_link": "warn"},
        ["a real folder"],
    ),
    (
        "27 the unit's PATH finds neither ninja nor a compiler",
        {
            "files": {
                **unit(**{f"PATH={f.PREFIX}/current/venv/bin:/usr/local/cuda-12.9/bin:":
                          "PATH=/usr/local/sbin:"}),
                "/usr/bin/c++": None,
                "/usr/include/python3.12/Python.h": None,
            }
        },
        {"build_tools": "fail"},
        [f"{f.PREFIX}/current/venv/bin/ninja", "build-essential", "python3-dev"],
    ),
    (
        "28a CUDA 13 libraries beside torch cu129",
        {
            "files": {
                f"{f.SITE}/nvidia_cuda_runtime_cu12-12.9.79.dist-info/METADATA": None,
                f"{f.SITE}/nvidia_cuda_runtime-13.0.96.dist-info/METADATA": "",
            }
        },
        {"runtime_coherence": "fail"},
        ["nvidia-cuda-runtime"],
    ),
    (
        "28b torch was replaced",
        {
            "files": {
                f"{f.SITE}/torch-2.11.0+cu129.dist-info/METADATA": None,
                f"{f.SITE}/torch-2.12.0.dist-info/METADATA": "",
                f"{f.SITE}/torch/version.py": "cuda: Optional[str] = '13.0'\n",
            },
            "stack": {
                "cuda": {"toolkit": "12.9", "torch_tag": "cu129"},
                "versions": {"torch": "2.11.0+cu129"},
                "forbidden": [],
            },
        },
        {"runtime_coherence": "fail"},
        ["torch is 2.12.0 but the stack holds 2.11.0+cu129"],
    ),
    (
        "28c torch without CUDA, and no stack to compare with",
        {"files": {f"{f.SITE}/torch/version.py": "cuda: Optional[str] = None\n"}, "stack": {}},
        {"runtime_coherence": "fail"},
        ["not a CUDA build"],
    ),
    (
        "29 flashinfer-cubin of another version",
        {
            "files": {
                f"{f.SITE}/flashinfer_python-0.6.12.dist-info/METADATA": None,
                f"{f.SITE}/flashinfer_python-0.6.14.dist-info/METADATA": "",
            }
        },
        {"flashinfer_pair": "fail"},
        ["0.6.14", "0.6.12", "flashinfer.ai/whl"],
    ),
    (
        "29 without cubin",
        {"stack": {}, "files": {f"{f.SITE}/flashinfer_cubin-0.6.12.dist-info/METADATA": None}},
        {"flashinfer_pair": "pass"},
        [],
    ),
    (
        "29 the version check is switched off",
        {
            "files": unit(
                **{"User=vllm": "User=vllm\nEnvironment=FLASHINFER_DISABLE_VERSION_CHECK=1"}
            )
        },
        {"flashinfer_pair": "warn"},
        ["FLASHINFER_DISABLE_VERSION_CHECK"],
    ),
    (
        "31 compiled kernels older than the patched header",
        {
            "files": {
                "/var/lib/vllm-turing/.cache/flashinfer/0.6.12/75/cached_ops/"
                "batch_prefill_x/batch_prefill_x.so": "old"
            }
        },
        {"jit_caches": "fail"},
        ["/.cache/flashinfer/0.6.12"],
    ),
    (
        "34b a patched copy in a second site-packages",
        {
            "files": {
                f"{USER_SITE}/flashinfer/__init__.py": ""
            }
        },
        {"second_site": "warn"},
        ["/.local/lib/python3.12/site-packages/flashinfer"],
    ),
    (
        "34 a header of another version dropped in",
        {
            "files": {
                f"{f.SITE}/flashinfer/data/include/flashinfer/attention/prefill.cuh": (
                    "struct KVRepackSmem { repack buffer }; smem_per_mma_kv smem_mma_kv_base"
                )
            }
        },
        {"flashinfer_patch": "fail"},
        ["NUM_MMA_KV=1"],
    ),
    (
        "vllm#47549 the floor of the released wheel",
        {
            "files": {
                f"{f.SITE}/vllm/v1/attention/backends/flashinfer.py": f.FLOOR.format("8, 0")
            }
        },
        {"vllm_floor": "fail"},
        ["vllm-flashinfer-sm75-floor"],
    ),
    (
        "35 a venv without pip",
        {
            "files": {
                f"{f.PREFIX}/releases/abc/venv/pyvenv.cfg": "home = /usr/bin\nversion = 3.12.3\n"
            }
        },
        {"runtime_venv": "fail"},
        ["it has no pip", "python3.12-venv"],
    ),
    (
        "35b a venv of a Python that is gone",
        {
            "files": {
                f"{f.PREFIX}/releases/abc/venv/pyvenv.cfg": "home = /usr/bin\nversion = 3.10.12\n"
            }
        },
        {"runtime_venv": "fail"},
        ["3.10.12"],
    ),
    (
        "36 a shard is missing, and a stray file",
        {
            "files": {
                f"{f.MODEL}/model-00002-of-00002.safetensors": None,
                f"{f.MODEL}/model.safetensors": f.safetensors(),
            }
        },
        {"model_files": "fail"},
        ["1 of 2 weight files are missing", "model-00002-of-00002.safetensors"],
    ),
    (
        "36 only a stray file",
        {"files": {f"{f.MODEL}/model.safetensors": f.safetensors()}},
        {"model_files": "warn"},
        ["model.safetensors"],
    ),
    (
        "36b no index",
        {"files": {f"{f.MODEL}/model.safetensors.index.json": None}},
        {"model_files": "fail"},
        ["model.safetensors.index.json is missing"],
    ),
    (
        "36c the index is no JSON",
        {"files": {f"{f.MODEL}/model.safetensors.index.json": "<html>"}},
        {"model_files": "fail", "model_pointers": "fail"},
        ["is no index"],
    ),
    (
        "36d the index points outside",
        {
            "files": {
                f"{f.MODEL}/model.safetensors.index.json": json.dumps({"weight_map": {"a": "../x"}})
            }
        },
        {"model_files": "fail"},
        ["'../x', outside the folder"],
    ),
    (
        "37 pointers of git-lfs, and a web page",
        {
            "files": {
                f"{f.MODEL}/model-00002-of-00002.safetensors": LOCK_LFS,
                f"{f.MODEL}/config.json": "<!DOCTYPE html><html>Sign in</html>",
            }
        },
        {"model_pointers": "fail", "model_safetensors": "fail"},
        ["LFS pointer, real size 2.2 GiB", "config.json (a web page)"],
    ),
    (
        "a shard that was cut off",
        {"files": {f"{f.MODEL}/model-00002-of-00002.safetensors": f.safetensors()[:-5]}},
        {"model_safetensors": "fail"},
        ["its header promises"],
    ),
    (
        "40 the mirror says 0 bytes",
        {"web": {"https://cdn.example/blob?sig=1": Answer(200, {"content-length": "0"})}},
        {"network_shard": "warn"},
        ["0 bytes", "Hub's list"],
    ),
    (
        "41 the weights come from a host that does not answer",
        {
            "files": {f"{f.MODEL}/config.json": None},
            "web": {f.SHARD: Answer(302, {"location": "https://cas-bridge.invalid/x"})},
        },
        {"network_shard": "fail", "network_hub": "pass"},
        ["sends the weights from 'cas-bridge.invalid'", "vllm_host_mirror_hub"],
    ),
    (
        "43 rate limited",
        {"web": {f.TREE: Answer(429, {"retry-after": "2"})}},
        {"network_hub": "warn", "network_shard": "skip"},
        ["rate limited by 'hub.example'"],
    ),
    (
        "a model that does not exist",
        {"files": {f"{f.MODEL}/config.json": None}, "web": {f.TREE: Answer(404)}},
        {"network_hub": "fail"},
        ["the Hub has no 'org/Q' at 'main'"],
    ),
    (
        "46 links into a cache that is gone",
        {
            "files": {f"{f.MODEL}/model-00001-of-00002.safetensors": None},
            "links": {f"{f.MODEL}/model-00001-of-00002.safetensors": "../../blobs/abc"},
        },
        {"model_links": "fail", "model_files": "fail"},
        ["model-00001-of-00002.safetensors -> ../../blobs/abc"],
    ),
    (
        "46 a file that the service's account cannot read",
        {
            "files": {f"{f.MODEL}/config.json": None, "/root/.cache/config.json": "{}"},
            "links": {f"{f.MODEL}/config.json": "/root/.cache/config.json"},
            "owners": {"/root": (0, 0, 0o700)},
        },
        {"model_readable": "fail", "model_links": "pass"},
        ["'vllm' cannot read 1 of 4 files", "/root/.cache/config.json"],
    ),
    (
        "46 unfinished downloads",
        {"files": {f"{f.MODEL}/.cache/huggingface/download/a.incomplete": "x" * 100}},
        {"model_leftovers": "warn"},
        ["1 unfinished downloads"],
    ),
    (
        "47 restarts for ever",
        {
            "files": unit(
                **{"StartLimitIntervalSec=3600\nStartLimitBurst=3\n": "",
                   "Restart=on-failure": "Restart=always"}
            )
        },
        {"unit_restart": "warn"},
        ["can never trip", "RestartSec=10"],
    ),
    (
        "47b the limit in the wrong section",
        {"files": unit(**{"[Service]": "[Service]\nStartLimitIntervalSec=600"})},
        {"unit_restart": "fail"},
        ["ignored by systemd", "[Unit]"],
    ),
    (
        "48 started before the cards are ready",
        {"files": unit(**{" nvidia-persistenced.service": ""})},
        {"unit_order": "warn"},
        ["nvidia-persistenced"],
    ),
    (
        "49 an orphaned worker",
        {
            "files": proc(4711, "VLLM::Worker_TP", 990, "/user.slice/user-990.slice/s-2.scope"),
            "commands": busy(),
        },
        {"gpu_processes": "fail"},
        ["pid 4711", "VLLM::Worker_TP", "of vllm", "20280 MiB on GPU 0", "kill 4711"],
    ),
    (
        "49b another user's job",
        {
            "files": proc(4711, "python", 1000, "/user.slice/user-1000.slice/session-3.scope"),
            "commands": busy(name="python"),
        },
        {"gpu_processes": "fail"},
        ["of llm", "somebody else"],
    ),
    (
        "49 the service's own worker",
        {
            "files": proc(4711, "VLLM::Worker_TP", 990, "/system.slice/vllm-turing.service"),
            "commands": busy(),
        },
        {"gpu_processes": "pass"},
        [],
    ),
    (
        "49c a process that cannot be seen",
        {"commands": busy("[Not Found]", "[Insufficient Permissions]"), "uid": 1000},
        {"gpu_processes": "warn"},
        ["not root"],
    ),
    (
        "49 shared memory full of dead segments",
        {
            "files": {"/dev/shm/nccl-AbCdEf": b"x" * 100},
            "statvfs": os.statvfs_result((4096, 4096, 10**8, 10**6, 10**6, 0, 0, 0, 4096, 255)),
            "commands": {("systemctl", "is-active", "vllm-turing.service"): ok("inactive\n")},
        },
        {"shared_memory": "fail"},
        ["/dev/shm/nccl-AbCdEf"],
    ),
    (
        "51 JSON that lost its quotes",
        {
            "files": unit(
                **{"'{\"method\":\"mtp\",\"num_speculative_tokens\":3}'":
                   "{\"method\":\"mtp\",\"num_speculative_tokens\":3}"}
            )
        },
        {"unit_json": "fail"},
        ["{method:mtp,num_speculative_tokens:3}"],
    ),
    (
        "51 quotes that stay",
        {
            "files": unit(
                **{"'{\"method\":\"mtp\",\"num_speculative_tokens\":3}'":
                   "\"'{\\\"method\\\":1}'\""}
            )
        },
        {"unit_json": "fail"},
        ["is no JSON"],
    ),
    (
        "51 a Python dict",
        {
            "files": unit(
                **{"'{\"method\":\"mtp\",\"num_speculative_tokens\":3}'":
                   "\"{'enable_thinking': True}\""}
            )
        },
        {"unit_json": "fail"},
        ["is no JSON"],
    ),
    (
        "53 a log that nothing rotates",
        {
            "files": {
                **unit(**{"RestartSec=10": "RestartSec=10\nStandardOutput=append:/home/llm/v.log"}),
                "/home/llm/v.log": "x" * 1000,
            }
        },
        {"unit_log": "warn"},
        ["/home/llm/v.log", "copytruncate"],
    ),
    (
        "53 a log that is rotated",
        {
            "files": {
                **unit(**{"RestartSec=10": "RestartSec=10\nStandardOutput=append:/home/llm/v.log"}),
                "/etc/logrotate.d/vllm": "/home/llm/v.log {\n copytruncate\n}\n",
            }
        },
        {"unit_log": "pass"},
        [],
    ),
    (
        "55 a checkout of two owners",
        {
            "owners": {
                f"{f.PREFIX}/releases/abc/src/FlashQLA": (0, 0, 0o755),
                f"{f.PREFIX}/releases/abc/src/FlashQLA/.git": (1000, 1000, 0o755),
            }
        },
        {"source_checkout": "warn"},
        ["dubious ownership"],
    ),
    (
        "59 another package manager is at work",
        {
            "files": {
                "/var/lib/dpkg/lock-frontend": "",
                "/proc/2345/comm": "unattended-upgr\n",
                "/proc/locks": "1: POSIX ADVISORY WRITE 2345 08:02:{inode} 0 EOF\n",
            }
        },
        {"dpkg_lock": "warn"},
        ["process 2345 (unattended-upgr)", "do not delete the lock file"],
    ),
    (
        "63 blanks that systemd cuts",
        {"files": unit(**{"User=vllm": "User=vllm\nEnvironment=X_PATH=/opt/my libs/lib64"})},
        {"unit_paths": "fail"},
        ["libs/lib64", "quote the whole assignment"],
    ),
    (
        "65d another distribution",
        {"files": {"/etc/os-release": 'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian 12"\n'}},
        {"distribution": "fail"},
        ["supported: Ubuntu 24.04 x86_64"],
    ),
    (
        "the reference host's own unit",
        {
            "files": {
                REAL_UNIT: HANDMADE,
                "/home/llm/models/Q/config.json": "{}",
                "/home/llm/models/Q/model.safetensors": f.safetensors(),
                "/home/llm/vllm-main-8000.log": "x",
            }
        },
        {
            "handmade_service": "warn",
            "cuda_stubs": "warn",
            "cuda_home": "warn",
            "unit_restart": "warn",
            "unit_order": "warn",
            "unit_log": "warn",
            "unit_exposure": "warn",
            "unit_json": "pass",
        },
        ["/home/llm/models/Q", "vllm-main.service:10", "everybody in the network"],
    ),
    (
        "the open module",
        {
            "files": {
                "/proc/driver/nvidia/version": (
                    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release\n"
                )
            }
        },
        {"driver_flavour": "warn"},
        ["1211", "nvidia_driver_flavour"],
    ),
    (
        "cards with 11 GB",
        {"commands": {f.SMI_XML: ok(XML.replace("22528 MiB", "11264 MiB"))}},
        {"gpu_memory": "fail", "plan_memory": "fail"},
        ["GPU 0 (0000:0a:00.0) has 11264 MiB", "the model does not fit"],
    ),
    (
        "no room for the model",
        {
            "files": {f"{f.MODEL}/config.json": None},
            "statvfs": os.statvfs_result((4096, 4096, 10**8, 10**6, 10**6, 10, 10, 10, 4096, 255)),
        },
        {"disk_space": "fail", "disk_inodes": "fail"},
        ["model 26.1 GiB in /var/lib/vllm-turing/models/Q"],
    ),
    (
        "a context that is longer than the KV cache",
        {"wish": {"vllm_service_args_custom": {"max-model-len": 262144, "kv-cache-dtype": "auto"}}},
        {"plan_context": "fail", "plan_memory": "pass"},
        ["vllm_service_args_custom set max-model-len 122400"],
    ),
    (
        "another program on the port",
        {
            "files": {
                "/proc/net/tcp": (
                    "  sl  local_address rem_address st\n"
                    "   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 0 0 0 777\n"
                ),
                **proc(55, "nginx", 0, "/system.slice/nginx.service"),
            },
            "links": {"/proc/55/fd/4": "socket:[777]"},
        },
        {"service_port": "fail"},
        ["port 8000 is taken by 'nginx' (pid 55, nginx.service)"],
    ),
    (
        "the IOMMU translates, P2P is off",
        {
            "files": {"/sys/kernel/iommu_groups/0/type": "DMA-FQ\n"},
            "commands": {f.SMI_P2P: ok((f.TI / "topo_p2p.txt").read_text().replace("OK", "CNS"))},
        },
        {"iommu": "warn", "gpu_p2p": "warn"},
        ["iommu=pt", "CNS"],
    ),
    (
        "a desktop on a card",
        {
            "commands": {
                f.SMI_XML: ok(
                    XML.replace("<display_active>Disabled", "<display_active>Enabled", 1).replace(
                        "<processes>\n\t\t</processes>",
                        COMPUTE.format(pid=99, name="/usr/lib/xorg/Xorg").replace(">C<", ">G<"),
                        1,
                    )
                )
            }
        },
        {"display_use": "warn", "gpu_processes": "pass"},
        ["Xorg"],
    ),
    (
        "a kernel without a module boots next",
        {"files": {"/boot/vmlinuz-6.17.0-30-generic": "k",
                   "/boot/initrd.img-6.17.0-30-generic": "i"}},
        {"kernel_next": "fail", "driver_module": "pass"},
        ["6.17.0-30-generic", "do not reboot before"],
    ),
    (
        "packages that nothing holds",
        {"commands": pkgs(libnvidia_gl_580=(f.DRIVER, "ii "))},
        {"driver_holds": "warn"},
        ["apt-mark hold libnvidia-gl-580"],
    ),
    (
        "a wrong clock",
        {"now": 1_600_000_000.0, "files": {"/run/systemd/timesync/synchronized": None}},
        {"clock": "fail"},
        ["2020-09-13", "certificate"],
    ),
    (
        "http without https proxy",
        {"files": {"/etc/environment": "http_proxy=http://me:secret@proxy.example:3128\n"}},
        {"network_proxy": "warn"},
        ["//proxy.example:3128", "https_proxy"],
    ),
    (
        "not root and no kernel log",
        {
            "uid": 1000,
            "commands": {
                f.LSPCI: ok(f.PCI.format(driver="nvidia") + "0000:0c:00.0 VGA compatible "
                            "controller [0300]: NVIDIA [10de:1e07]\n"),
                ("dmesg",): Result((), 1, "", "dmesg: read kernel buffer failed"),
            },
        },
        {"gpu_usable": "warn"},
        ["(not root)"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "expected", "words"),
    [pytest.param(*case[1:], id=case[0].replace(" ", "-")) for case in CASES],
)
def test_reported_case(
    tmp_path: Any, parts: dict[str, Any], expected: dict[str, str], words: list[str]
) -> None:
    box = Box(tmp_path / "host", **parts)
    if "{inode}" in str(box.files.get("/proc/locks", "")):
        # The lock names the file by its inode, known once the file is there; nothing is removed.
        host = box.host()
        inode = (tmp_path / "host/var/lib/dpkg/lock-frontend").stat().st_ino
        (tmp_path / "host/proc/locks").write_text(
            str(box.files["/proc/locks"]).replace("{inode}", str(inode))
        )
        box.host = lambda: host  # type: ignore[method-assign]  # the tree is made already
    report = box.report()
    found = {row["id"]: row["status"] for row in report["checks"]}
    assert {name: found[name] for name in expected} == expected
    text = json.dumps([row for row in report["checks"] if row["id"] in expected])
    text = text.replace('\\"', '"').replace("\\\\", "\\")
    for word in words:
        assert word in text
    assert all(row["fix"] for row in report["checks"] if row["status"] == "fail")
    assert "the check itself failed" not in json.dumps(report)
    assert "secret" not in json.dumps(report)
