"""Checks of the cards, their links, memory and disks."""

from __future__ import annotations

from ..gpu_facts import RTX_2080_TI_IDS, TURING_IDS, capability
from ..nvidia_smi import SmiGpu
from ..preflight_check import (
    Context,
    Outcome,
    check,
    failed,
    gib,
    listing,
    passed,
    skipped,
    warned,
)

#: Words for why nvidia-smi gave no card, with what to do about each.
SILENCE = {
    "not installed": ("nvidia-smi is not installed", "run site.yml (role nvidia_driver)"),
    "no device": (
        "nvidia-smi finds no device",
        "check with 'lspci -nnk -d 10de:' which driver owns the cards, then reboot",
    ),
    "no supported device": (
        "the driver supports none of the cards",
        "set nvidia_driver_flavour to 'proprietary'; the open module needs Turing or newer",
    ),
    "module not loaded": (
        "the kernel module is not loaded",
        "run 'modprobe nvidia' and read its message; 'dkms status' tells if one was built",
    ),
    "mismatch": ("driver and libraries do not match", "reboot"),
    "unknown": ("nvidia-smi lists no card and does not say why", "run 'nvidia-smi' by hand"),
}

_HANG_FIX = (
    "check the seating of the NVLink bridge, enable nvidia-persistenced, then reboot; "
    "a card that hangs again after a cold start is broken"
)

#: Bytes that a run brings, per place: the venv with CUDA libraries and uv's cache of the same
#: (hard links on one file system), the toolkit, apt's archives. Measured: venv 8.9 GB, cache
#: 9.2 GB shared with it, toolkit about 7 GB unpacked; the CPU stack's venv is 2.5 GB.
_GIB = 2**30
RUNTIME_BYTES = 14 * _GIB
CPU_RUNTIME_BYTES = 4 * _GIB
TOOLKIT_BYTES = 8 * _GIB
APT_BYTES = 4 * _GIB
CACHE_BYTES = 3 * _GIB
#: The reference model: 12 shards, vision and MTP, "~29 GB" by the reference host.
MODEL_BYTES = 30 * 10**9
#: Files of a release: flashinfer-cubin alone has 15,601.
RUNTIME_INODES = 150_000


def card_name(gpu: SmiGpu) -> str:
    """Return a card's number and address for a sentence."""
    return f"GPU {gpu.index} ({gpu.bus_id or 'address unknown'})"


def chosen(context: Context) -> list[SmiGpu]:
    """Return the cards that the service will use."""
    ids = context.wish.device_ids
    return [gpu for gpu in context.gpus.gpus if gpu.index in ids]


def _no_driver_yet(context: Context) -> Outcome:
    return skipped("seen once the driver runs", context.gpus.silence)


@check("hardware", "gpu_cards")
def gpu_cards(context: Context) -> Outcome:
    """Check that the wanted number of cards of the wanted kind is there."""
    facts, wish = context.gpus, context.wish
    wanted, kind = wish.whole("preflight_cards"), wish.text("preflight_compute_capability")
    if facts.gpus:
        right = [gpu for gpu in facts.gpus if capability(gpu) == kind]
        seen = listing([f"{gpu.index}: {gpu.name} ({capability(gpu)})" for gpu in facts.gpus])
        if len(right) >= wanted:
            return passed(f"{len(right)} cards of compute capability {kind}", seen)
        if len(facts.pci) >= wanted and facts.lost:
            return failed(
                f"only {len(right)} of {wanted} cards of compute capability {kind} answer",
                seen,
                "see gpu_usable",
            )
        return failed(
            f"{len(right)} of {wanted} wanted cards have compute capability {kind}",
            seen,
            "put the cards in, or set preflight_cards and vllm_service_args to what is there",
        )
    right_pci = [card for card in facts.pci if kind == "7.5" and TURING_IDS.match(card.device_id)]
    seen = listing([f"{card.bus_id} [{card.device_id}]" for card in facts.pci])
    if len(right_pci) >= wanted:
        known = all(card.device_id in RTX_2080_TI_IDS for card in right_pci)
        name = "RTX 2080 Ti" if known else "Turing"
        return passed(f"{len(right_pci)} {name} cards on the PCI bus ({facts.pci_source})", seen)
    if not facts.pci_source:
        return failed(
            "no NVIDIA card on the PCI bus",
            "lspci and /sys/bus/pci show none",
            "check that the cards are seated and powered, and passed through to this machine",
        )
    return failed(
        f"{len(right_pci)} of {wanted} wanted cards on the PCI bus are Turing (SM75)",
        seen,
        "put the cards in, or set preflight_cards to what is there",
    )


@check("hardware", "gpu_memory")
def gpu_memory(context: Context) -> Outcome:
    """Check that each chosen card has enough memory."""
    if not context.gpus.gpus:
        return _no_driver_yet(context)
    least = context.wish.whole("preflight_card_memory_mib")
    cards = chosen(context)
    if not cards:
        return failed(
            "none of the chosen cards is there",
            f"device-ids {context.wish.device_ids}",
            "set device-ids in vllm_service_args_custom to cards that nvidia-smi lists",
        )
    silent = [card_name(gpu) for gpu in cards if gpu.memory_total is None]
    if silent:
        return failed(
            f"{listing(silent)} does not tell its memory",
            "memory.total has no number",
            "cold start the machine; a card that stays silent is broken",
        )
    small = [
        f"{card_name(gpu)} has {gpu.memory_total} MiB"
        for gpu in cards
        if (gpu.memory_total or 0) < least
    ]
    if small:
        return failed(
            f"{listing(small)}; at least {least} MiB are needed",
            ", ".join(f"{gpu.name}" for gpu in cards),
            "use cards with 22 GB, or a smaller model (hf_model_repo, preflight_card_memory_mib)",
        )
    return passed(", ".join(f"GPU {gpu.index}: {gpu.memory_total} MiB" for gpu in cards))


@check("hardware", "gpu_chosen")
def gpu_chosen(context: Context) -> Outcome:
    """Check that the chosen card numbers point at cards of the wanted kind."""
    facts, wish = context.gpus, context.wish
    if not facts.gpus:
        return _no_driver_yet(context)
    kind = wish.text("preflight_compute_capability")
    missing = [i for i in wish.device_ids if i not in {gpu.index for gpu in facts.gpus}]
    wrong = [
        f"{gpu.index} is {gpu.name or 'unknown'}"
        for gpu in chosen(context)
        if capability(gpu) != kind
    ]
    right = [str(gpu.index) for gpu in facts.gpus if capability(gpu) == kind]
    fix = (
        f"set device-ids in vllm_service_args_custom to '{','.join(right)}'"
        if right
        else "see gpu_cards: no card of the wanted kind is there"
    )
    if missing or wrong:
        text = listing([*(f"{number} is not there" for number in missing), *wrong])
        return failed(f"device-ids name other cards: {text}", "numbered by PCI bus", fix)
    for unit in context.units:
        visible = unit.environment.get("CUDA_VISIBLE_DEVICES")
        plain = ",".join(str(number) for number in range(len(facts.gpus)))
        if visible is not None and not plain.startswith(visible):
            return warned(
                f"CUDA_VISIBLE_DEVICES='{visible}' reorders the cards under device-ids",
                unit.origin.get("CUDA_VISIBLE_DEVICES", unit.name),
                "remove it there; device-ids chooses the cards",
                mended_by="vllm_service" if unit.ours else "",
            )
    names = ", ".join(f"{gpu.index} = {gpu.bus_id}" for gpu in chosen(context))
    return passed(f"device-ids {','.join(map(str, wish.device_ids))}: {names}")


@check("hardware", "gpu_usable")
def gpu_usable(context: Context) -> Outcome:
    """Check that every card on the PCI bus is usable by the driver."""
    facts, wish = context.gpus, context.wish
    if not facts.pci and not facts.gpus:
        return skipped("no NVIDIA card on the PCI bus")
    if not facts.gpus and not facts.lost:
        if not context.driver_there:
            return skipped("seen once the driver runs", facts.silence)
        text, fix = SILENCE.get(facts.silence, (f"nvidia-smi {facts.silence}", _HANG_FIX))
        return failed(f"no card is usable: {text}", facts.answers.get("smi", ""), fix)
    if not facts.pci:
        return warned(
            "the PCI bus cannot be read, so a card that fell off it would not be seen",
            fix="install pciutils (lspci)",
            mended_by="vllm_host",
        )
    used = {gpu.bus_id for gpu in facts.gpus}
    lost = [card for card in facts.pci if card.bus_id not in used]
    if not lost and not facts.lost:
        return passed(f"{len(facts.gpus)} of {len(facts.pci)} PCI devices usable")
    names = [f"{card.bus_id} [{card.device_id}]" for card in lost] or facts.lost
    log = kernel_log(context, "Xid", "not supported by open", "fallen off the bus", "probe routine")
    kind = wish.text("preflight_compute_capability")
    enough = sum(capability(gpu) == kind for gpu in facts.gpus) >= wish.whole("preflight_cards")
    text = f"{len(facts.gpus)} of {len(facts.pci)} PCI devices usable; not {listing(names)}"
    if "not supported by open" in log:
        fix = "set nvidia_driver_flavour to 'proprietary', or take that card out"
    else:
        fix = (
            "check power and seating of that card, then cold start the machine; "
            "reinstalling the driver does not help"
        )
    return (warned if enough else failed)(text, log, fix)


def kernel_log(context: Context, *words: str) -> str:
    """Return the kernel log's last line with one of the words; says so when it is not readable."""
    result = context.host.run(("dmesg",), timeout=5)
    if not result.ok:
        return "the kernel log cannot be read" + ("" if context.host.uid == 0 else " (not root)")
    lines = [line for line in result.stdout.splitlines() if any(word in line for word in words)]
    return lines[-1].strip() if lines else ""


@check("hardware", "gpu_mode")
def gpu_mode(context: Context) -> Outcome:
    """Check that the chosen cards are whole and open to computing."""
    if not context.gpus.gpus:
        return _no_driver_yet(context)
    split = [card_name(gpu) for gpu in chosen(context) if gpu.mig]
    if split:
        return failed(
            f"MIG is on for {listing(split)}: not supported here",
            fix="nvidia-smi -mig 0, then reboot",
        )
    closed = [
        f"{card_name(gpu)}: {gpu.compute_mode}"
        for gpu in chosen(context)
        if gpu.compute_mode and gpu.compute_mode.lower() not in ("default", "n/a")
    ]
    if closed:
        return failed(
            f"the compute mode keeps vLLM's processes out: {listing(closed)}",
            fix="nvidia-smi -c DEFAULT",
        )
    if not chosen(context) or any(not gpu.compute_mode for gpu in chosen(context)):
        return skipped("the driver does not tell the compute mode")
    return passed("no MIG, compute mode Default")


@check("hardware", "nvlink_links")
def nvlink_links(context: Context) -> Outcome:
    """Check that all NVLink links between the chosen cards are active."""
    facts, wanted = context.gpus, context.wish.whole("preflight_links")
    if not facts.gpus:
        return _no_driver_yet(context)
    if wanted == 0 or len(context.wish.device_ids) < 2:
        return skipped("no NVLink is wanted")
    numbers = [gpu.index for gpu in chosen(context)]
    cards = {number: facts.links.get(number, {}) for number in numbers}
    if not any(cards.values()):
        return warned(
            "no NVLink between the cards: tensor parallel traffic goes over PCIe",
            facts.answers.get("nvlink", "nvidia-smi nvlink -s lists no link"),
            "fit the NVLink bridge (both slots of one pitch), then cold start; "
            "without one set preflight_links: 0",
        )
    down: dict[int, list[int]] = {}
    for number, links in cards.items():
        for link in range(max(wanted, len(links))):
            if not links.get(link):
                down.setdefault(link, []).append(number)
    if down:
        text = "; ".join(
            f"Link {link} inactive on GPU {' and '.join(map(str, gpus))}"
            for link, gpus in sorted(down.items())
        )
        active = min(sum(1 for speed in links.values() if speed) for links in cards.values())
        return warned(
            f"{text} (NV{active} instead of NV{wanted})",
            f"{wanted} links a card are expected",
            "reseat the NVLink bridge and cold start",
        )
    speeds = sorted({speed for links in cards.values() for speed in links.values() if speed})
    return passed(f"{wanted} links a card at {'/'.join(f'{s:g}' for s in speeds)} GB/s")


@check("hardware", "gpu_topology")
def gpu_topology(context: Context) -> Outcome:
    """Check that the driver connects the chosen cards by NVLink."""
    facts, wanted = context.gpus, context.wish.whole("preflight_links")
    if not facts.gpus:
        return _no_driver_yet(context)
    numbers = context.wish.device_ids
    if wanted == 0 or len(numbers) < 2:
        return skipped("no NVLink is wanted")
    pair = (numbers[0], numbers[1])
    cell = facts.topology.get(pair)
    if cell is None:
        reason = facts.answers.get("topo", "the matrix has no such pair")
        return warned(
            f"the topology of GPU {pair[0]} and {pair[1]} is unknown: {reason}",
            "nvidia-smi topo -m",
            _HANG_FIX if "timed out" in reason else "run 'nvidia-smi topo -m' by hand",
        )
    if cell == f"NV{wanted}":
        return passed(f"GPU {pair[0]} and {pair[1]}: {cell}")
    return warned(
        f"GPU {pair[0]} and {pair[1]} are connected by {cell}, not NV{wanted}",
        "nvidia-smi topo -m",
        "reseat the NVLink bridge and cold start",
    )


@check("hardware", "gpu_p2p")
def gpu_p2p(context: Context) -> Outcome:
    """Check that the chosen cards may read each other's memory."""
    facts = context.gpus
    if not facts.gpus:
        return _no_driver_yet(context)
    numbers = context.wish.device_ids
    if len(numbers) < 2:
        return skipped("one card needs no peer")
    pair = (numbers[0], numbers[1])
    cell = facts.p2p.get(pair)
    if cell is None:
        reason = facts.answers.get("p2p", "the matrix has no such pair")
        return warned(f"P2P between GPU {pair[0]} and {pair[1]} is unknown: {reason}")
    if cell == "OK":
        return passed(f"GPU {pair[0]} and {pair[1]}: P2P OK")
    return warned(
        f"P2P between GPU {pair[0]} and {pair[1]} is not OK but {cell}",
        "nvidia-smi topo -p2p r",
        "turn the IOMMU (VT-d, AMD-Vi) and ACS off in the firmware, or boot with iommu=pt; else "
        "set disable-custom-all-reduce: true in vllm_service_args_custom",
    )


@check("hardware", "iommu")
def iommu(context: Context) -> Outcome:
    """Check that the IOMMU does not translate the cards' traffic to each other."""
    host = context.host
    words = (host.read("/proc/cmdline") or "").split()
    if not words:
        return skipped("the kernel's command line cannot be read")
    if "iommu=pt" in words or {"intel_iommu=off", "amd_iommu=off", "iommu=off"} & set(words):
        return passed("passthrough or off", " ".join(w for w in words if "iommu" in w))
    if not host.is_dir("/sys/kernel/iommu_groups"):
        return skipped("/sys/kernel/iommu_groups cannot be read")
    kinds = {
        (host.read(f"/sys/kernel/iommu_groups/{group}/type") or "").strip()
        for group in host.listdir("/sys/kernel/iommu_groups")
    }
    translating = {kind for kind in kinds if kind.upper().startswith("DMA")}
    if translating:
        return warned(
            "the IOMMU translates DMA: P2P between the cards may fail or hang",
            f"/sys/kernel/iommu_groups: {listing(sorted(translating))}",
            "add iommu=pt to GRUB_CMDLINE_LINUX in /etc/default/grub, run update-grub, reboot",
        )
    return passed("no IOMMU translation", listing(sorted(k for k in kinds if k)) or "no groups")


@check("hardware", "pcie_link")
def pcie_link(context: Context) -> Outcome:
    """Check that the chosen cards have wide PCIe links."""
    if not context.gpus.gpus:
        return _no_driver_yet(context)
    widths = {gpu.index: gpu.pcie_width for gpu in chosen(context)}
    known = {index: width for index, width in widths.items() if width}
    if len(known) < len(widths) or not widths:
        return skipped("the driver does not tell the link width")
    narrow = [f"GPU {index} x{width}" for index, width in known.items() if width < 8]
    if narrow:
        return warned(
            f"narrow PCIe link: {listing(narrow)}; loading and PCIe traffic are slow",
            fix="use a slot with 8 or 16 lanes; with NVLink serving itself hardly suffers",
        )
    return passed(", ".join(f"GPU {index} x{width}" for index, width in known.items()))


@check("hardware", "display_use")
def display_use(context: Context) -> Outcome:
    """Check that no display takes memory of the chosen cards."""
    if not context.gpus.gpus:
        return _no_driver_yet(context)
    cards = chosen(context)
    users = [
        f"{process.name} (pid {process.pid}, {process.memory or '?'} MiB) on GPU {gpu.index}"
        for gpu in cards
        for process in gpu.processes
        if process.kind == "G"
    ]
    active = [card_name(gpu) for gpu in cards if gpu.display_active]
    if users or active:
        return warned(
            f"a display uses {listing(active or ['the cards'])} and shares memory and time",
            listing(users),
            "connect the display to another card, or systemctl set-default multi-user.target",
        )
    if not cards or any(gpu.display_active is None for gpu in cards):
        return skipped("the driver does not tell whether a display is active")
    return passed("no display is active")


@check("hardware", "memory")
def memory(context: Context) -> Outcome:
    """Check that the machine has enough memory."""
    text = context.host.read("/proc/meminfo") or ""
    total = next(
        (
            int(line.split()[1]) * 1024
            for line in text.splitlines()
            if line.startswith("MemTotal:") and line.split()[1:2] and line.split()[1].isdecimal()
        ),
        0,
    )
    if not total:
        return skipped("/proc/meminfo cannot be read")
    # Weights pass through the page cache; below 16 GiB even compiling a kernel gets tight.
    least, good = (5 * _GIB, 8 * _GIB) if context.wish.cpu else (15 * _GIB, 30 * _GIB)
    if total < least:
        return failed(
            f"{gib(total)} of memory; at least {gib(least)} are needed",
            "MemTotal",
            "add memory",
        )
    if total < good:
        return warned(
            f"{gib(total)} of memory: loading ~29 GB of weights will be slow",
            "MemTotal",
            "add memory; the reference host has 47 GiB",
        )
    return passed(f"{gib(total)} of memory", "MemTotal")


def needs(context: Context) -> list[tuple[str, int, str]]:
    """Return (path, bytes still to come, what) for every place that receives bytes."""
    wish, host = context.wish, context.host
    wanted: list[tuple[str, int, str]] = []
    release = f"{wish.text('vllm_host_prefix')}/current/release.json"
    if not host.exists(release):
        size = CPU_RUNTIME_BYTES if wish.cpu else RUNTIME_BYTES
        wanted.append((wish.text("vllm_host_prefix"), size, "runtime"))
        if not wish.cpu:
            wanted.append((wish.text("vllm_runtime_cache_dir"), CACHE_BYTES, "compiled kernels"))
    if not wish.cpu and not host.exists(f"{wish.text('cuda_toolkit_home')}/bin/nvcc"):
        wanted.append((wish.text("cuda_toolkit_home"), TOOLKIT_BYTES, "CUDA toolkit"))
        wanted.append(("/var/cache/apt/archives", APT_BYTES, "packages"))
    size = model_bytes(context)
    if size:
        wanted.append((wish.text("hf_model_path"), size, "model"))
    return wanted


def model_bytes(context: Context) -> int:
    """Return how many bytes of the model are still to come; 0 when it is there."""
    wish, host = context.wish, context.host
    if host.exists(f"{wish.text('hf_model_path')}/config.json"):
        return 0
    from .network import hub_size

    return hub_size(context) or (0 if wish.cpu else MODEL_BYTES)


@check("hardware", "disk_space")
def disk_space(context: Context) -> Outcome:
    """Check that every file system that receives bytes has room for them."""
    wanted = needs(context)
    if not wanted:
        return passed("nothing is to come")
    per_disk: dict[int, list[tuple[str, int, str]]] = {}
    free: dict[int, int] = {}
    for path, size, what in wanted:
        disk = context.host.disk(path)
        if disk is None:
            return skipped(f"the file system below '{path}' cannot be read")
        per_disk.setdefault(disk.device, []).append((path, size, what))
        free[disk.device] = disk.free
    short, tight, seen = [], [], []
    for device, items in per_disk.items():
        total = sum(size for _, size, _ in items)
        parts = ", ".join(f"{what} {gib(size)} in {path}" for path, size, what in items)
        text = f"{gib(free[device])} free, {gib(total)} needed ({parts})"
        seen.append(text)
        if free[device] < total:
            short.append(text)
        elif free[device] < total * 1.1:
            tight.append(text)
    fix = "make room, or move hf_model_path, vllm_host_state_dir or vllm_host_prefix"
    if short:
        return failed(f"not enough room: {'; '.join(short)}", fix=fix)
    if tight:
        return warned(f"hardly enough room: {'; '.join(tight)}", fix=fix)
    return passed("; ".join(seen))


@check("hardware", "disk_inodes")
def disk_inodes(context: Context) -> Outcome:
    """Check that the file system of the releases can hold another release's files."""
    path = context.wish.text("vllm_host_prefix")
    disk = context.host.disk(path)
    if disk is None:
        return skipped(f"the file system below '{path}' cannot be read")
    if disk.inodes == 0:
        return passed("the file system has no fixed number of inodes", disk.path)
    if disk.inodes_free < RUNTIME_INODES:
        return failed(
            f"{disk.inodes_free} inodes free below '{path}'; a release needs {RUNTIME_INODES}",
            disk.path,
            "remove old files there, or move vllm_host_prefix",
        )
    return passed(f"{disk.inodes_free} inodes free", disk.path)
