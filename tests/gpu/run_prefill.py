"""Run FlashInfer's batch prefill under Turing's limits; JSON on stdout.

Errors are relative to attention in float64 of the same quantised keys and values. Pages are
permuted, every unused slot is NaN, and so is the output before the call.

argv: library with the limits, folder with the built module, type of the cache, "check" or "time"
"""

from __future__ import annotations

import ctypes
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

LIMITS = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch brings its own runtime
LIMITS.turing_switch.argtypes = [ctypes.c_int, ctypes.c_size_t]

import flashinfer  # noqa: E402 (the limits have to be loaded first)
import torch  # noqa: E402 (the limits have to be loaded first)
from flashinfer.jit import env  # noqa: E402 (the limits have to be loaded first)

env.FLASHINFER_AOT_DIR = Path(sys.argv[2])
FP8 = sys.argv[3] == "fp8"
CACHE, BITS, NAN = (
    (torch.float8_e4m3fn, torch.uint8, 0x7F) if FP8 else (torch.float16, torch.int16, 0x7E00)
)
HEADS, KV_HEADS, DIM = 12, 2, 256  # of one of two GPUs, reference model
# more than half of any newer card's shared memory per SM, so that one block runs at a time
ONE_BLOCK = 118_784
WORKSPACE = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def make(queries: int, keys: int, page: int, seed: int, poison: bool = True) -> dict[str, Any]:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda")

    pages = -(-keys // page)
    pool = torch.full(
        (pages + 7, 2, page, KV_HEADS, DIM), NAN if poison else 0, dtype=BITS, device="cuda"
    )
    order = torch.randperm(pages + 7, generator=generator, device="cuda")[:pages]
    q = (2 * normal(queries, HEADS, DIM)).half()
    k, v = normal(keys, KV_HEADS, DIM).to(CACHE), normal(keys, KV_HEADS, DIM).to(CACHE)
    token = torch.arange(keys, device="cuda")
    pool[order[token // page], 0, token % page] = k.view(BITS)
    pool[order[token // page], 1, token % page] = v.view(BITS)

    def integers(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return {
        "q": q,
        "k": k,
        "v": v,
        "pool": pool.view(CACHE),
        "plan": (
            *(integers(0, queries), integers(0, pages), order.to(torch.int32)),
            integers((keys - 1) % page + 1),
        ),
        "page": page,
    }


def planned(data: dict[str, Any], padding: int = 0) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", backend="fa2")
    LIMITS.turing_switch(1, padding)
    try:
        wrapper.plan(
            *data["plan"],
            *(HEADS, KV_HEADS, DIM, data["page"]),
            causal=True,
            q_data_type=torch.float16,
            kv_data_type=CACHE,
        )
    finally:
        LIMITS.turing_switch(0, 0)
    return wrapper


def call(wrapper: Any, data: dict[str, Any], out: Any, padding: int = 0, **scales: float) -> None:
    LIMITS.turing_switch(1, padding)
    try:
        # PDL is a feature of SM90, which compute_75 code has not
        wrapper.run(data["q"], data["pool"], out=out, enable_pdl=False, **scales)
    finally:
        LIMITS.turing_switch(0, 0)


def attention(data: dict[str, Any], k_scale: float, v_scale: float) -> Any:
    queries, keys = data["q"].shape[0], data["k"].shape[0]
    k, v = (data[name].float().double() for name in ("k", "v"))
    later = (
        torch.arange(keys, device="cuda")[None, :]
        > torch.arange(keys - queries, keys, device="cuda")[:, None]
    )
    out = torch.empty(queries, HEADS, DIM, dtype=torch.float64, device="cuda")
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = data["q"][:, head].double() @ k[:, group].T * (k_scale / math.sqrt(DIM))
        scores.masked_fill_(later, -math.inf)
        out[:, head] = torch.softmax(scores, -1) @ v[:, group] * v_scale
    return out


def check() -> list[dict[str, Any]]:
    results = []
    shapes = (
        *((1, 17, 16), (4, 300, 16), (1, 17_000, 1600), (4, 17_000, 16), (4, 51_201, 1600)),
        *((128, 128, 16), (1000, 1000, 16), (1000, 17_000, 1600), (4096, 17_408, 16)),
    )
    scales = {"k_scale": 0.37, "v_scale": 1.9} if FP8 else {}
    for number, (queries, keys, page) in enumerate(shapes):
        data = make(queries, keys, page, seed=number)
        out = torch.full((queries, HEADS, DIM), math.nan, dtype=torch.float16, device="cuda")
        LIMITS.turing_reset()
        result: dict[str, Any] = {"shape": [queries, keys, page]}
        try:
            call(planned(data), data, out, **scales)
            torch.cuda.synchronize()
            want = attention(data, scales.get("k_scale", 1.0), scales.get("v_scale", 1.0))
            result["error"] = float((out.double() - want).norm() / want.norm())
            # the control: two rows of the keys exchanged in the reference
            data["k"].view(BITS)[[3, 12]] = data["k"].view(BITS)[[12, 3]]
            wrong = attention(data, scales.get("k_scale", 1.0), scales.get("v_scale", 1.0))
            result["wrong_row"] = float((out.double() - wrong).norm() / wrong.norm())
        except RuntimeError as error:
            result["refused"] = str(error).splitlines()[0][:200]
        result["asked"] = LIMITS.turing_asked()
        results.append(result)
    return results


def time() -> list[dict[str, Any]]:
    results = []
    for queries, keys, runs in (
        (4096, 17_408, 25),
        (4096, 51_200, 13),
        (4, 17_000, 50),
        (4, 51_000, 50),
    ):
        data = make(queries, keys, 16, seed=1, poison=False)
        out = torch.empty(queries, HEADS, DIM, dtype=torch.float16, device="cuda")
        wrapper = planned(data, ONE_BLOCK)
        calls = 20 if queries <= 4 else 1
        for _ in range(3):
            call(wrapper, data, out, ONE_BLOCK)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # so that the gaps between short launches do not count
            for _ in range(calls):
                call(wrapper, data, out, ONE_BLOCK)
        taken = []
        for _ in range(runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / calls)
        results.append(
            {
                "queries": queries,
                "keys": keys,
                "ms": statistics.median(taken),
                "least": min(taken),
                "most": max(taken),
            }
        )
    return results


if __name__ == "__main__":
    answer = check() if sys.argv[4] == "check" else time()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "results": answer}))
