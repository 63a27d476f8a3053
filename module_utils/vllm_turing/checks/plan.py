"""Checks that what is wished for fits the cards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .. import kv_plan
from ..preflight_check import (
    Context,
    Outcome,
    check,
    failed,
    passed,
    skipped,
    warned,
)
from .hardware import MODEL_BYTES, chosen
from .network import hub_size, model_config

_MIB = 2**20

#: Activations of a 4096-token chunk, CUDA graphs and what torch keeps, a card; estimate from the
#: reference host's own figures: 20,726 MiB budget less weights and KV leaves 1,145 to 1,483 MiB.
ACTIVATION_MIB = 1300


@check("plan", "plan_cards")
def plan_cards(context: Context) -> Outcome:
    """Check that tensor parallel size, chosen cards and cards that are there agree."""
    args = context.wish.args
    size = _number(args.get("tensor-parallel-size", 1))
    chosen_ids = str(args.get("device-ids", ""))
    count = len([part for part in chosen_ids.split(",") if part.strip()])
    if context.wish.cpu:
        return skipped("this stack uses no card")
    if size is None:
        return failed(
            f"tensor-parallel-size '{args.get('tensor-parallel-size')}' is no number",
            "vllm_service_args",
            "set it to the number of cards",
        )
    if count and count != int(size):
        return failed(
            f"tensor-parallel-size {int(size)} and device-ids '{chosen_ids}' do not agree",
            "vllm_service_args",
            "make them equal",
        )
    there = len(context.gpus.gpus) or len(context.gpus.pci)
    if there < size:
        return failed(
            f"tensor-parallel-size {int(size)}, but {there} cards are there",
            context.gpus.source or context.gpus.pci_source or "no source tells the cards",
            "set tensor-parallel-size and device-ids in vllm_service_args_custom",
        )
    return passed(f"{int(size)} of {there} cards")


@check("plan", "plan_memory")
def plan_memory(context: Context) -> Outcome:
    """Check that Weights, activations and some KV cache fit the cards' memory."""
    wish = context.wish
    if wish.cpu:
        return skipped("this stack uses no card")
    size = hub_size(context) or _on_disk(context) or MODEL_BYTES
    parallel = _number(wish.args.get("tensor-parallel-size", 1)) or 1
    share = _number(wish.args.get("gpu-memory-utilization", 0.9)) or 0.9
    cards = [gpu.memory_total for gpu in chosen(context) if gpu.memory_total]
    if context.gpus.gpus and not cards:
        return skipped("the chosen cards do not tell their memory")
    memory = min(cards, default=wish.whole("preflight_card_memory_mib"))
    source = "nvidia-smi" if cards else "preflight_card_memory_mib"
    budget = memory * share
    weights = size / parallel / _MIB
    left = budget - weights - ACTIVATION_MIB
    text = (
        f"{memory} MiB x {share:g} = {budget:.0f} MiB a card: weights {weights:.0f}, activations "
        f"about {ACTIVATION_MIB}, left for the KV cache about {left:.0f}"
    )
    if left <= 0:
        return failed(
            f"the model does not fit: {text} MiB",
            source,
            "raise gpu-memory-utilization (at most about 0.95), use more cards or a smaller model",
        )
    if left < 1024:
        return warned(
            f"hardly any room for the KV cache: {text} MiB", source, "lower max-model-len"
        )
    return passed(f"{text} MiB", source)


@check("plan", "plan_context")
def plan_context(context: Context) -> Outcome:
    """Check that one request of the full length fits the KV cache that vLLM will plan."""
    wish = context.wish
    if wish.cpu:
        return skipped("this stack uses no card")
    config = model_config(context)
    if not config:
        return skipped("the model's config.json is neither on the host nor told by the Hub")
    cards = [gpu.memory_total for gpu in chosen(context) if gpu.memory_total]
    if context.gpus.gpus and not cards:
        return skipped("the chosen cards do not tell their memory")
    total = min(cards, default=wish.whole("preflight_card_memory_mib"))
    share = _number(wish.args.get("gpu-memory-utilization", 0.9)) or 0.9
    try:
        wanted = _kv_wish(wish.args)
        model = kv_plan.model_of(config)
        card = kv_plan.memory(config, wanted, total, share, kv_plan.REST_MIB)
        found = kv_plan.plan(model, wanted, card.available)
    except kv_plan.PlanError as error:
        return skipped(f"cannot be planned: {error}")
    text = (
        f"about {card.available // _MIB} MiB of KV cache a card, longest request "
        f"{found.usable_max_model_len} tokens"
    )
    if found.starts and not found.stalls:
        return passed(f"{found.max_model_len} tokens fit: {text}")
    hints = kv_plan.advice(model, wanted, found, card)
    fix = f"in vllm_service_args_custom set {' or '.join(hints) or 'a smaller max-model-len'}"
    return failed(f"{found.why} ({text})", "estimate by vLLM's own rules", fix)


def _kv_wish(args: Mapping[str, Any]) -> kv_plan.Wish:
    """Return the flags that decide the KV cache.

    :raises kv_plan.PlanError: when one of them is no such value
    """
    speculative = args.get("speculative-config") or {}
    try:
        if isinstance(speculative, str):
            speculative = json.loads(speculative)
        blocks = args.get("num-gpu-blocks-override")
        size = args.get("block-size")
        return kv_plan.Wish(
            tensor_parallel_size=int(args.get("tensor-parallel-size", 1)),
            kv_cache_dtype=str(args.get("kv-cache-dtype", "auto")),
            max_model_len=int(args.get("max-model-len", -1)),
            num_speculative_tokens=int(speculative.get("num_speculative_tokens", 0)),
            enable_prefix_caching=args.get("enable-prefix-caching", True) is not False,
            mamba_ssm_cache_dtype=str(args.get("mamba-ssm-cache-dtype", "auto")),
            block_size=None if size is None else int(size),
            max_num_batched_tokens=int(args.get("max-num-batched-tokens", 2048)),
            num_gpu_blocks_override=None if blocks is None else int(blocks),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise kv_plan.PlanError(f"vllm_service_args holds an unusable value ({error})") from error


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _on_disk(context: Context) -> int:
    """Return the size of the weights that are on disk."""
    path = context.wish.text("hf_model_path")
    files = context.host.glob(path, "*.safetensors")
    return sum(context.host.size(file) or 0 for file in files)
