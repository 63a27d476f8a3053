"""What the host is meant to become, as far as the checks need to know.

The preflight role hands in the roles' public variables; on a host checked without Ansible the
defaults below stand in. A test holds them in step with the roles' own defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The roles' defaults that matter to the checks, with derived ones written out.
DEFAULTS: dict[str, Any] = {
    "vllm_host_prefix": "/opt/vllm-turing",
    "vllm_host_config_dir": "/etc/vllm-turing",
    "vllm_host_state_dir": "/var/lib/vllm-turing",
    "vllm_host_log_dir": "/var/log/vllm-turing",
    "vllm_host_unit_dir": "/etc/systemd/system",
    "vllm_host_user": "vllm",
    "vllm_host_group": "vllm",
    "vllm_host_mirror_apt": "",
    "vllm_host_mirror_nvidia": (
        "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64"
    ),
    "vllm_host_mirror_python": "",
    "vllm_host_mirror_pytorch": "https://download.pytorch.org/whl",
    "vllm_host_mirror_vllm": "https://wheels.vllm.ai",
    "vllm_host_mirror_hub": "https://huggingface.co",
    "vllm_host_mirror_git": "https://github.com",
    "nvidia_driver_version": "580.159.03",
    "nvidia_driver_flavour": "proprietary",
    "nvidia_driver_modules": "auto",
    "cuda_toolkit_version": "12.9",
    "cuda_toolkit_home": "/usr/local/cuda-12.9",
    "vllm_runtime_stack": "vllm-0.24.0-cu129",
    "vllm_runtime_python": "",
    "vllm_runtime_venv": "/opt/vllm-turing/current/venv",
    "vllm_runtime_cache_dir": "/var/lib/vllm-turing/cache",
    "hf_model_repo": "nerkyor/Qwen3.6-27B-DSV4Pro-Thinking-Distill-FP8",
    "hf_model_revision": "main",
    "hf_model_path": ("/var/lib/vllm-turing/models/Qwen3.6-27B-DSV4Pro-Thinking-Distill-FP8"),
    "vllm_service_name": "vllm-turing",
    "vllm_service_host": "127.0.0.1",
    "vllm_service_port": 8000,
    "vllm_service_args": {
        "device-ids": "0,1",
        "tensor-parallel-size": 2,
        "max-model-len": 100000,
        "max-num-batched-tokens": 4096,
        "gpu-memory-utilization": 0.92,
        "kv-cache-dtype": "fp8_e4m3",
        "enable-prefix-caching": True,
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 3},
    },
    "vllm_service_args_custom": {},
    "vllm_service_api_key_enabled": True,
    "preflight_cards": 2,
    "preflight_card_memory_mib": 22000,
    "preflight_compute_capability": "7.5",
    "preflight_links": 2,
    "preflight_network": True,
    "preflight_network_timeout": 5,
}


@dataclass(frozen=True)
class Wish:
    """The wanted state.

    :ivar values: the roles' public variables
    :ivar site: True when site.yml follows at once: what it mends itself does not stop the run
    :ivar stack: the software stack's data, where it could be read
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    site: bool = False
    stack: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Return a variable's value, or its default."""
        value = self.values.get(name)
        return DEFAULTS.get(name) if value is None else value

    def text(self, name: str) -> str:
        """Return a variable as text; empty when it has none."""
        value = self.get(name)
        return "" if value is None else str(value)

    def whole(self, name: str) -> int:
        """Return a variable as a whole number; its default when it is none."""
        for value in (self.values.get(name), DEFAULTS.get(name)):
            try:
                return int(value)  # type: ignore[arg-type]  # what is no number raises
            except (TypeError, ValueError, OverflowError):
                continue
        return 0

    def flag(self, name: str) -> bool:
        """Return a variable as true or false, in Ansible's spellings."""
        value = self.get(name)
        if isinstance(value, str):
            return value.strip().lower() in ("true", "yes", "on", "1", "y", "t")
        return bool(value)

    @property
    def args(self) -> dict[str, Any]:
        """VLLM's flags: the defaults with the custom ones merged over, null removing one."""
        merged: dict[str, Any] = {}
        for name in ("vllm_service_args", "vllm_service_args_custom"):
            flags = self.get(name)
            if isinstance(flags, Mapping):
                merged.update({str(k).lstrip("-").replace("_", "-"): v for k, v in flags.items()})
        return {flag: value for flag, value in merged.items() if value is not None}

    @property
    def cpu(self) -> bool:
        """Whether the stack runs without a card (the lab's engine)."""
        cuda = self.stack.get("cuda", "unknown") if self.stack else "unknown"
        return cuda in (None, "", "cpu") or self.text("vllm_runtime_stack").endswith("-cpu")

    @property
    def device_ids(self) -> list[int]:
        """The cards that the service will use, by PCI order."""
        chosen = str(self.args.get("device-ids", ""))
        ids = [int(part) for part in chosen.split(",") if part.strip().isdecimal()]
        return ids or list(range(self.whole("preflight_cards")))


def from_json(text: str) -> Wish:
    """Read a wish from JSON: ``{"values": {...}, "site": false, "stack": {...}}``.

    :raises ValueError: when it is no such document
    """
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("the document is no mapping")
    values, stack = document.get("values", {}), document.get("stack", {})
    if not isinstance(values, dict) or not isinstance(stack, dict):
        raise ValueError("'values' and 'stack' must be mappings")
    return Wish(values, bool(document.get("site", False)), stack)
