"""How vLLM 0.24.0 sizes the KV cache of a hybrid model (full attention + gated delta net layers).

Pure arithmetic, without vLLM: block size, page, groups, blocks, capacity and concurrency as vLLM
will report them, and what of that can really be used. Names in brackets are vLLM's own functions.

vLLM's figures are one block too generous: the block pool keeps block 0 for itself (``null_block``),
but neither the reported capacity nor the check at the start subtracts it. A request that needs
exactly the reported blocks starts, runs out of blocks near its end and is never scheduled again. So
the usable length is that of one block less, and vLLM's own automatic length is never recommended.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MIB = 1 << 20
#: Bytes of one element by vLLM's names. ``auto`` is the model's own type.
DTYPE_BYTES = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
#: Smallest block of the attention backends that run here, in tokens.
BACKEND_BLOCK = 16
#: Memory that is neither weights nor KV cache: activations of a 4,096-token chunk, CUDA graphs and
#: what the allocator keeps. Not measured; 1.1 to 1.5 GiB fit the reference host's 162 blocks.
REST_MIB = 1300
#: Marlin keeps one block scale for each output column (computed from its source, not measured).
MARLIN_SCALES_MIB = 362
#: Rotary table, norms and other small tensors that every card holds.
SMALL_TENSORS_MIB = 60


class PlanError(Exception):
    """Something that cannot be planned, in one sentence."""


@dataclass(frozen=True)
class Model:
    """What of config.json decides.

    :ivar conv_kernel: taps of the short convolution; its state keeps one less
    :ivar ssm_dtype: type of the recurrent state when ``--mamba-ssm-cache-dtype`` is ``auto``
    """

    full_layers: int
    linear_layers: int
    kv_heads: int
    head_dim: int
    linear_k_heads: int
    linear_v_heads: int
    linear_k_dim: int
    linear_v_dim: int
    conv_kernel: int
    ssm_dtype: str
    max_position: int
    mtp_layers: int = 1
    dtype: str = "float16"


@dataclass(frozen=True)
class Wish:
    """The flags that decide.

    :ivar max_model_len: -1 for vLLM's automatic length
    """

    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    max_model_len: int = -1
    num_speculative_tokens: int = 0
    enable_prefix_caching: bool = True
    mamba_ssm_cache_dtype: str = "auto"
    block_size: int | None = None
    max_num_batched_tokens: int = 4096
    num_gpu_blocks_override: int | None = None


@dataclass(frozen=True)
class Plan:
    """What vLLM will do with a wish and an amount of memory.

    :ivar starts: whether vLLM starts
    :ivar stalls: it starts, but one request of the full length can never finish
    :ivar why: the reason for not starting or stalling
    :ivar kv_cache_size_tokens, max_concurrency: as vLLM reports them; ``None`` if refused
    :ivar usable_max_model_len: longest request that really finishes
    """

    starts: bool
    stalls: bool
    why: str | None
    mamba_cache_mode: str
    block_size: int
    mamba_page_unpadded_bytes: int
    attn_bytes_per_token_per_layer: int
    page_size_bytes: int
    num_groups: int
    layers_per_group: list[int]
    bytes_per_block: int
    num_blocks: int
    max_model_len: int
    blocks_per_request: int
    kv_cache_size_tokens: int | None
    max_concurrency: float | None
    usable_max_model_len: int
    available_bytes: int


def model_of(config: Mapping[str, Any]) -> Model:
    """Read a decoded config.json.

    :raises PlanError: for a model that is not of this kind
    """
    text = config.get("text_config") or config
    try:
        layers = int(text["num_hidden_layers"])
        kinds = text.get("layer_types")
        if kinds:
            linear = sum(1 for kind in kinds if kind == "linear_attention")
        else:
            linear = layers - layers // int(text["full_attention_interval"])
        return Model(
            full_layers=layers - linear,
            linear_layers=linear,
            kv_heads=int(text["num_key_value_heads"]),
            head_dim=int(
                text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
            ),
            linear_k_heads=int(text["linear_num_key_heads"]),
            linear_v_heads=int(text["linear_num_value_heads"]),
            linear_k_dim=int(text["linear_key_head_dim"]),
            linear_v_dim=int(text["linear_value_head_dim"]),
            conv_kernel=int(text["linear_conv_kernel_dim"]),
            ssm_dtype=str(text.get("mamba_ssm_dtype") or "auto"),
            max_position=int(text["max_position_embeddings"]),
            mtp_layers=int(text.get("mtp_num_hidden_layers") or 1),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"config.json lacks {error}: only hybrid models with linear and full attention layers "
            "(qwen3_5) can be planned"
        ) from error


def plan(model: Model, wish: Wish, available_bytes: int) -> Plan:
    """Work out what vLLM will do.

    :param available_bytes: what vLLM leaves for the KV cache on the card that has least
    :raises PlanError: for a wish that is no wish
    """
    tp, n = wish.tensor_parallel_size, wish.num_speculative_tokens
    _check(model, wish)
    mode = "align" if wish.enable_prefix_caching else "none"  # [MambaModelConfig]
    state = _state_bytes(model, wish)
    heads = max(1, model.kv_heads // tp)
    token = heads * 2 * model.head_dim * _bytes(wish.kv_cache_dtype, model.dtype)
    # [_align_hybrid_block_size] the attention page must hold a recurrent state.
    step = max(BACKEND_BLOCK, wish.block_size or BACKEND_BLOCK)
    block = step * _ceil(state, step * token)
    page = block * token
    # [_get_kv_cache_groups_uniform_page_size]
    full = model.full_layers + (model.mtp_layers if n else 0)
    few, many = sorted((full, model.linear_layers))
    size = many if many < 1.5 * few else few
    linear_groups = _ceil(model.linear_layers, size)
    full_groups = _ceil(full, size)
    layers = [*_shares(model.linear_layers, linear_groups), *_shares(full, full_groups)]
    per_block = page * max(layers)  # [get_kv_cache_config_from_groups]
    blocks = available_bytes // per_block
    if wish.num_gpu_blocks_override is not None:
        blocks = wish.num_gpu_blocks_override
    fixed = linear_groups * ((2 if mode == "align" else 1) + n)  # [max_memory_usage_bytes]

    def longest(count: int) -> int:
        return min(max(0, (count - fixed) // full_groups) * block, model.max_position)

    length = wish.max_model_len if wish.max_model_len > 0 else longest(blocks)
    request = full_groups * _ceil(length, block) + fixed
    usable = longest(blocks - 1)
    why = None
    if available_bytes <= 0 and wish.num_gpu_blocks_override is None:
        why = "there is no memory for the KV cache"
    elif blocks < request or length <= 0:
        need = request * per_block
        why = (
            f"a request of {length} tokens needs {need / MIB:.0f} MiB of KV cache, "
            f"{blocks * per_block / MIB:.0f} MiB are there"
        )
    fits = why is None
    if fits and mode == "align" and block > wish.max_num_batched_tokens:
        # [validate_block_size] comes after planning.
        why = (
            f"with prefix caching max-num-batched-tokens ({wish.max_num_batched_tokens}) must be "
            f"at least the block size ({block})"
        )
    starts = why is None
    stalls = starts and blocks < request + 1
    if stalls:
        why = (
            f"it starts but a request of {length} tokens never finishes: it needs {request} blocks "
            f"and the pool has {blocks} less the one that it keeps for itself; "
            f"the longest that finishes is {usable} tokens"
        )
    concurrency = blocks / request if fits else None
    return Plan(
        starts=starts,
        stalls=stalls,
        why=why,
        mamba_cache_mode=mode,
        block_size=block,
        mamba_page_unpadded_bytes=state,
        attn_bytes_per_token_per_layer=token,
        page_size_bytes=page,
        num_groups=len(layers),
        layers_per_group=layers,
        bytes_per_block=per_block,
        num_blocks=blocks,
        max_model_len=length,
        blocks_per_request=request,
        kv_cache_size_tokens=None if concurrency is None else int(concurrency * length),
        max_concurrency=concurrency,
        usable_max_model_len=usable,
        available_bytes=available_bytes,
    )


@dataclass(frozen=True)
class Memory:
    """One card's memory, in bytes.

    :ivar budget: what vLLM takes, ``ceil(total * utilisation)``
    :ivar rest: activations, graphs and the allocator's reserve; an assumption
    """

    total: int
    budget: int
    weights: int
    rest: int

    @property
    def available(self) -> int:
        """What is left for the KV cache."""
        return max(0, self.budget - self.weights - self.rest)


def memory(
    config: Mapping[str, Any], wish: Wish, total_mib: float, utilization: float, rest_mib: float
) -> Memory:
    """Estimate how a card's memory is divided before anything is downloaded."""
    total = int(total_mib * MIB)
    weights = weights_bytes(config, wish)
    return Memory(total, math.ceil(total * utilization), weights, int(rest_mib * MIB))


def weights_bytes(config: Mapping[str, Any], wish: Wish) -> int:
    """Estimate the weights on one card, for block-FP8 linear layers and 16-bit everything else.

    Reproduces the reference model: 28.7 GiB in all, 14.6 GiB a card with two of them.

    :raises PlanError: when the sizes are not in config.json
    """
    text = config.get("text_config") or config
    model = model_of(config)
    try:
        hidden, inner = int(text["hidden_size"]), int(text["intermediate_size"])
        query = int(text["num_attention_heads"]) * model.head_dim
        vocabulary = int(text["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"config.json lacks {error}: the weights cannot be estimated") from error
    linear_bytes = 1 if config.get("quantization_config") else 2
    gate = 2 if text.get("attn_output_gate", True) else 1
    mlp = 3 * hidden * inner
    attention = hidden * (gate * query + 2 * model.kv_heads * model.head_dim) + query * hidden
    values = model.linear_v_heads * model.linear_v_dim
    delta = hidden * (2 * model.linear_k_heads * model.linear_k_dim + 2 * values) + values * hidden
    body = model.full_layers * (attention + mlp) + model.linear_layers * (delta + mlp)
    tied = 1 if config.get("tie_word_embeddings") else 2
    split = body * linear_bytes + tied * vocabulary * hidden * 2 + _vision_bytes(config, hidden)
    if linear_bytes == 1:
        split += MARLIN_SCALES_MIB * MIB
    if wish.num_speculative_tokens:
        split += model.mtp_layers * (attention + mlp) * linear_bytes + 2 * hidden * hidden * 2
    return split // wish.tensor_parallel_size + SMALL_TENSORS_MIB * MIB


def advice(model: Model, wish: Wish, found: Plan, card: Memory | None) -> list[str]:
    """Return what would make a wish fit, each a flag and a value that finishes."""
    if found.starts and not found.stalls:
        return []
    said: list[str] = []
    if found.usable_max_model_len > 0 and (found.stalls or "batched" not in (found.why or "")):
        said.append(f"max-model-len {found.usable_max_model_len}")
    if found.block_size > wish.max_num_batched_tokens and wish.enable_prefix_caching:
        said.append(f"max-num-batched-tokens {found.block_size}")
    if _bytes(wish.kv_cache_dtype, model.dtype) > 1:
        smaller = plan(model, replace(wish, kv_cache_dtype="fp8_e4m3"), found.available_bytes)
        if smaller.starts and not smaller.stalls:
            said.append("kv-cache-dtype fp8_e4m3")
    if card is not None:
        need = card.weights + card.rest + (found.blocks_per_request + 1) * found.bytes_per_block
        share = math.ceil(need / card.total * 100) / 100
        if share <= 0.96 and need > card.budget:
            said.append(f"gpu-memory-utilization {share:.2f}")
    return said


def bar(card: Memory, found: Plan, width: int = 60) -> list[str]:
    """Draw one card: weights, KV cache, rest, free."""
    kv = found.num_blocks * found.bytes_per_block
    free = max(0, card.total - card.weights - kv - card.rest)
    parts = [("weights", "#", card.weights), ("KV cache", "=", kv), ("rest", "+", card.rest),
             ("free", ".", free)]  # fmt: skip
    drawn = "".join(mark * round(amount / card.total * width) for _, mark, amount in parts)
    legend = "  ".join(f"{mark} {name} {amount / MIB:,.0f}" for name, mark, amount in parts)
    return [f"[{drawn[:width].ljust(width, '.')}] {card.total / MIB:,.0f} MiB", f" {legend} MiB"]


def _check(model: Model, wish: Wish) -> None:
    """Refuse what vLLM would refuse before it plans.

    :raises PlanError: with the value and what is accepted
    """
    tp = wish.tensor_parallel_size
    for name, value in (("linear value heads", model.linear_v_heads),
                        ("linear key heads", model.linear_k_heads)):  # fmt: skip
        if tp < 1 or value % tp:
            raise PlanError(f"tensor-parallel-size {tp} does not divide the {value} {name}")
    if wish.num_speculative_tokens < 0:
        raise PlanError(f"num-speculative-tokens {wish.num_speculative_tokens} is negative")
    for flag, dtype in (("kv-cache-dtype", wish.kv_cache_dtype),
                        ("mamba-ssm-cache-dtype", wish.mamba_ssm_cache_dtype)):  # fmt: skip
        if dtype != "auto" and dtype not in DTYPE_BYTES:
            raise PlanError(f"{flag} {dtype!r} is unknown; use auto, {', '.join(DTYPE_BYTES)}")


def _state_bytes(model: Model, wish: Wish) -> int:
    """Return the recurrent state of one layer on one card [gated_delta_net_state_shape]."""
    tp, n = wish.tensor_parallel_size, wish.num_speculative_tokens
    channels = (
        2 * model.linear_k_heads * model.linear_k_dim + model.linear_v_heads * model.linear_v_dim
    )
    conv = (model.conv_kernel - 1 + n) * (channels // tp) * DTYPE_BYTES[model.dtype]
    dtype = wish.mamba_ssm_cache_dtype if wish.mamba_ssm_cache_dtype != "auto" else model.ssm_dtype
    ssm = (model.linear_v_heads // tp) * model.linear_v_dim * model.linear_k_dim
    return conv + ssm * _bytes(dtype, model.dtype)


def _vision_bytes(config: Mapping[str, Any], hidden: int) -> int:
    """Estimate the vision tower in 16 bit; 0 without one."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or "hidden_size" not in vision:
        return 0
    width, inner = int(vision["hidden_size"]), int(vision.get("intermediate_size", 0))
    depth = int(vision.get("depth", vision.get("num_hidden_layers", 0)))
    merged = width * int(vision.get("spatial_merge_size", 2)) ** 2
    out = int(vision.get("out_hidden_size", hidden))
    blocks = depth * (4 * width * width + 2 * width * inner)
    patch = 3 * int(vision.get("temporal_patch_size", 2)) * int(vision.get("patch_size", 16)) ** 2
    embedded = width * (patch + int(vision.get("num_position_embeddings", 2304)))
    return 2 * (blocks + embedded + merged * merged + merged * out)


def _bytes(dtype: str, own: str) -> int:
    return DTYPE_BYTES[own if dtype == "auto" else dtype]


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _shares(layers: int, groups: int) -> list[int]:
    return [len(range(index, layers, groups)) for index in range(groups)]


def main(argv: list[str] | None = None) -> int:
    """Plan on the command line.

    :returns: 0 when the wish fits, 1 when it does not, 2 when it cannot be planned
    """
    parser = argparse.ArgumentParser(prog="plan", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="the model's config.json")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=-1)
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument("--mamba-ssm-cache-dtype", default="auto")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--num-gpu-blocks-override", type=int)
    parser.add_argument("--available-bytes", type=int, help="left for the KV cache on one card")
    parser.add_argument("--gpu-memory", type=float, help="MiB of one card")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--rest-mib", type=float, default=REST_MIB,
                        help="MiB for activations and graphs (an assumption)")  # fmt: skip
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        if (options.available_bytes is None) == (options.gpu_memory is None):
            raise PlanError("give either --available-bytes or --gpu-memory")
        config = _read(options.config)
        names = Wish.__dataclass_fields__
        wish = Wish(**{name: value for name, value in vars(options).items() if name in names})
        model = model_of(config)
        card = None
        if options.gpu_memory is not None:
            card = memory(
                config, wish, options.gpu_memory, options.gpu_memory_utilization, options.rest_mib
            )
        available = options.available_bytes if card is None else card.available
        found = plan(model, wish, available)
    except PlanError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    hints = advice(model, wish, found, card)
    if options.json:
        print(json.dumps({**asdict(found), "advice": hints, "memory": card and asdict(card)}))
    else:
        print("\n".join(text(found, card, hints)))
    return 0 if found.starts and not found.stalls else 1


def text(found: Plan, card: Memory | None, hints: list[str]) -> list[str]:
    """Return a plan in words."""
    reported = "refused"
    if found.kv_cache_size_tokens is not None and found.max_concurrency is not None:
        reported = f"{found.kv_cache_size_tokens:,} tokens, {found.max_concurrency:.3f} x"
    lines = bar(card, found) if card is not None else []
    lines += [
        f"block {found.block_size} tokens, {found.num_blocks} blocks of "
        f"{found.bytes_per_block / MIB:.2f} MiB in {found.num_groups} groups, "
        f"{found.blocks_per_request} for a request of {found.max_model_len:,}",
        f"vLLM will report: {reported}",
        f"longest request that finishes: {found.usable_max_model_len:,} tokens",
    ]
    if found.why:
        lines.append(f"{'STALLS' if found.stalls else 'DOES NOT START'}: {found.why}")
    if hints:
        lines.append(f"would fit: {' | '.join(hints)}")
    return lines


def _read(path: str) -> Mapping[str, Any]:
    """Read config.json.

    :raises PlanError: when it is not there or no JSON object
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{path!r} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path!r} holds no mapping")
    return data


if __name__ == "__main__":
    sys.exit(main())
