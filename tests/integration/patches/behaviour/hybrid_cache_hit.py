"""Two turns of a conversation on vLLM's real scheduler, for many prompt lengths; JSON on stdout.

Runs in an environment with vLLM. The cache layout is the one that vLLM plans for the reference
configuration (a hybrid model with three groups of Mamba layers and one of attention, blocks of 1600
tokens with an fp8 cache and 800 with fp16, MTP with 3 tokens, prefix caching, chunks of 4096); the
model and the sampler are left out: every step yields one token and three drafts that are rejected.

argv: folder of a model configuration, block size, speculative tokens
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCKS = 2000
ANSWER = 200  # tokens of the first turn's answer
QUESTION = 50  # tokens that the second turn adds


def engine_config(model: str, speculative_tokens: int) -> VllmConfig:
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": "bfloat16",
        "max_model_len": 100_000,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "skip_mm_profiling": True,
        "mamba_ssm_cache_dtype": "float32",
    }
    if speculative_tokens:
        arguments["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": speculative_tokens,
        }
    return EngineArgs(**arguments).create_engine_config()


def layout(block_size: int, speculative_tokens: int) -> KVCacheConfig:
    """Three Mamba groups and one of attention, as planned for 48 + 16 layers."""
    token = 1_638_400 // block_size  # bytes of one attention token of one layer
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=token // 4, dtype=torch.uint8
    )
    mamba = MambaSpec(
        block_size=block_size,
        shapes=((24, 128, 128),),
        dtypes=(torch.float32,),
        page_size_padded=1_638_400,
        mamba_cache_mode="align",
        num_speculative_blocks=speculative_tokens,
    )
    groups = [KVCacheGroupSpec([f"linear.{i}"], mamba) for i in range(3)]
    groups.append(KVCacheGroupSpec(["attention"], attention))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


class Turns:
    """One scheduler with an empty cache, and requests that run on it one after the other."""

    def __init__(self, config: VllmConfig, block_size: int, speculative_tokens: int) -> None:
        self.drafts = speculative_tokens
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.block_size = block_size
        config.cache_config.mamba_cache_mode = "align"
        self.scheduler = Scheduler(
            config,
            layout(block_size, speculative_tokens),
            StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=block_size,
            mm_registry=MULTIMODAL_REGISTRY,
        )
        function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        self.hasher = get_request_block_hasher(block_size, function)

    def request(self, name: str, prompt: list[int]) -> Request:
        parameters = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
        return Request(name, prompt, parameters, None, block_hasher=self.hasher)

    def run(self, request: Request) -> list[int]:
        """Run a request to its end and return what it generated."""
        self.scheduler.add_request(request)
        answer: list[int] = []
        while self.scheduler.get_num_unfinished_requests():
            step = self.scheduler.schedule()
            names = list(step.num_scheduled_tokens)
            sampled: list[list[int]] = []
            for name in names:
                running = self.scheduler.requests[name]
                ready = running.num_computed_tokens >= running.num_tokens
                sampled.append([100 + len(answer) % 50] if ready else [])
                answer += sampled[-1]
            self.scheduler.update_from_output(
                step,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=sampled,
                ),
            )
            drafting = [name for name, tokens in zip(names, sampled, strict=True) if tokens]
            if drafting and self.drafts:
                self.scheduler.update_draft_token_ids(
                    DraftTokenIds(drafting, [[7] * self.drafts for _ in drafting])
                )
        return answer

    def hit(self, request: Request) -> tuple[int, list[int], list[bool]]:
        """Tokens of a cache hit, blocks per group, and whether each group's last one is real."""
        manager = self.scheduler.kv_cache_manager
        blocks, tokens = manager.get_computed_blocks(request)
        null = manager.block_pool.null_block
        last = [not group or group[-1] is not null for group in blocks.blocks]
        return tokens, [len(group) for group in blocks.blocks], last


def main() -> None:
    model, block_size, speculative_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = engine_config(model, speculative_tokens)
    numbers = random.Random(1)
    results = []
    # on, just before and after block boundaries, and where the answer crosses one
    lengths = sorted(
        {
            block * block_size + offset
            for block in range(1, 13)
            for offset in (-ANSWER // 2, -1, 0, 1, block_size // 2)
        }
        | {60 * block_size}
    )
    for length in lengths:
        turns = Turns(config, block_size, speculative_tokens)
        prompt = [numbers.randrange(10, 200) for _ in range(length)]
        answer = turns.run(turns.request("first", prompt))
        second = prompt + answer + [5] * QUESTION
        tokens, blocks, last = turns.hit(turns.request("second", second))
        results.append(
            {
                "prompt": length,
                "second": len(second),
                "hit_tokens": tokens,
                "blocks": blocks,
                "last_block_is_real": last,
            }
        )
    print(json.dumps({"block_size": block_size, "turns": results}))


if __name__ == "__main__":
    main()
