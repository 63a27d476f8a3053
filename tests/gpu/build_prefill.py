"""Build FlashInfer's batch prefill for Turing, through FlashInfer's own JIT; JSON on stdout.

Compiled as compute_75 code; the environment that the test sets makes nvcc assemble it for the GPU
that is there. argv: type of the cache (fp16, fp8), folder for the result.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from flashinfer.jit.attention import gen_batch_prefill_module


def main() -> None:
    cache = {"fp16": torch.float16, "fp8": torch.float8_e4m3fn}[sys.argv[1]]
    module = gen_batch_prefill_module(
        *("fa2", torch.float16, cache, torch.float16, torch.int32),
        *(256, 256),  # head_dim of q and k, of v
        *(0, False, False, False),  # no positions, sliding window, soft cap, fp16 reduction
    )
    module.build(verbose=False)
    target = Path(sys.argv[2]) / module.name / f"{module.name}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(module.jit_library_path, target)
    print(json.dumps({"name": module.name, "bytes": target.stat().st_size}))


if __name__ == "__main__":
    main()
