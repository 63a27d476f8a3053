"""FlashQLA's legacy kernels behind our vLLM patch, on a GPU, against a recurrence of our own.

Needs a GPU with its toolkit (nvcc, and the headers of cuBLAS, cuSPARSE and cuSOLVER that torch
includes), torch, ninja, and FlashQLA's files at the patch's commit in VLLM_TURING_FLASHQLA_DIR.
The extension is built for the GPU that is there, so on a newer card than Turing this checks the
code and our use of it, not Turing's machine code.

    VLLM_TURING_FLASHQLA_DIR=… pytest tests/gpu/test_flashqla_legacy.py
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
import types
from typing import Any

import pytest

from tests.integration.patches import packages
from vllm_turing import unified_diff, wheel_patch

torch = pytest.importorskip("torch", reason="torch is not installed here")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)
SOURCE = os.environ.get("VLLM_TURING_FLASHQLA_DIR", "")
if not SOURCE:
    pytest.skip("VLLM_TURING_FLASHQLA_DIR names no FlashQLA tree", allow_module_level=True)

WRAPPER = "vllm/model_executor/layers/mamba/ops/gdn_flashqla_legacy.py"
KEY_HEADS, VALUE_HEADS, DIM = 8, 24, 128  # of one of two GPUs, reference model


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> types.ModuleType:
    """Load the module that the vLLM patch adds, with the patched FlashQLA importable."""
    checkout = tmp_path_factory.mktemp("src") / "FlashQLA"
    shutil.copytree(SOURCE, checkout)
    wheel_patch.apply_all(packages.load("flashqla-sm75-import"), {"FlashQLA": checkout})
    sys.path.insert(0, str(checkout))

    (patch,) = packages.load("vllm-gdn-flashqla-legacy")
    (added,) = [diff for diff in unified_diff.parse(patch.diff) if diff.path == WRAPPER]
    content = unified_diff.apply(None, added)
    assert content is not None
    path = tmp_path_factory.mktemp("wrapper") / "gdn_flashqla_legacy.py"
    path.write_bytes(content)
    specification = importlib.util.spec_from_file_location("gdn_flashqla_legacy", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def batch(lengths: list[int], seed: int) -> dict[str, Any]:
    """Make the inputs of a ragged batch, as the model's layers shape them."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda")

    tokens = sum(lengths)
    forget = torch.linspace(math.log(0.002), math.log(4.0), VALUE_HEADS, device="cuda").exp()
    unit = torch.nn.functional.normalize
    return {
        "q": unit(normal(1, tokens, KEY_HEADS, DIM), dim=-1),
        "k": unit(normal(1, tokens, KEY_HEADS, DIM), dim=-1),
        "v": normal(1, tokens, VALUE_HEADS, DIM),
        "g": -forget * torch.nn.functional.softplus(normal(1, tokens, VALUE_HEADS)),
        "beta": torch.sigmoid(normal(1, tokens, VALUE_HEADS)),
        "initial_state": 0.3 * normal(len(lengths), VALUE_HEADS, DIM, DIM),
        "cu_seqlens": torch.tensor(
            [0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda"
        ),
    }


def recurrence(data: dict[str, Any], index: int) -> tuple[Any, Any]:
    """Run one sequence of a batch in float64 by the definition, state as [value, key]."""
    start, end = (int(x) for x in data["cu_seqlens"][index : index + 2])
    q, k, v, g, beta = (data[name][0, start:end].double() for name in ("q", "k", "v", "g", "beta"))
    q, k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, 1) for x in (q, k))
    state = data["initial_state"][index].double()
    out = torch.empty_like(v)
    for t in range(end - start):
        state = state * g[t].exp()[:, None, None]
        error = (v[t] - (state @ k[t, :, :, None])[..., 0]) * beta[t][:, None]
        state = state + error[..., None] * k[t][:, None, :]
        out[t] = (state @ q[t, :, :, None])[..., 0] * DIM**-0.5
    return out, state


def error(got: Any, want: Any) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    "lengths", [[64], [1000], [4096], [5, 0, 300, 1, 77]], ids=["64", "1000", "4096", "ragged"]
)
def test_against_the_recurrence(wrapper: types.ModuleType, lengths: list[int]) -> None:
    data = batch(lengths, seed=len(lengths) + lengths[0])
    out, state = wrapper.chunk_gated_delta_rule_flashqla_legacy(**data)
    torch.cuda.synchronize()
    worst = 0.0
    for index, length in enumerate(lengths):
        if not length:
            assert torch.equal(state[index], data["initial_state"][index])
            continue
        start = int(data["cu_seqlens"][index])
        want, want_state = recurrence(data, index)
        worst = max(
            worst, error(out[0, start : start + length], want), error(state[index], want_state)
        )
    print(f"\n{torch.cuda.get_device_name()}, {lengths}: worst relative error {worst:.1e}")
    assert worst < 1e-5


def test_the_other_state_layout_would_be_seen(wrapper: types.ModuleType) -> None:
    """The control: read as [key, value], the same numbers are far off."""
    data = batch([64], seed=1)
    _out, state = wrapper.chunk_gated_delta_rule_flashqla_legacy(**data)
    data["initial_state"] = data["initial_state"].transpose(-1, -2).contiguous()
    _want, want_state = recurrence(data, 0)
    assert error(state[0], want_state) > 0.1


def test_two_calls_are_one(wrapper: types.ModuleType) -> None:
    data = batch([4096], seed=2)
    out, state = wrapper.chunk_gated_delta_rule_flashqla_legacy(**data)
    half = {**data, "cu_seqlens": None}
    parts = []
    for part in (slice(0, 2048), slice(2048, 4096)):
        for name in ("q", "k", "v", "g", "beta"):
            half[name] = data[name][:, part]
        piece, half["initial_state"] = wrapper.chunk_gated_delta_rule_flashqla_legacy(**half)
        parts.append(piece)
    assert torch.equal(torch.cat(parts, 1), out)
    assert torch.equal(half["initial_state"], state)


def test_float16_inputs_as_the_model_has_them(wrapper: types.ModuleType) -> None:
    data = batch([500], seed=3)
    for name in ("q", "k", "v"):
        data[name] = data[name].half()
    out, state = wrapper.chunk_gated_delta_rule_flashqla_legacy(**data)
    want, want_state = recurrence(data, 0)
    assert out.dtype == torch.float16 and state.dtype == torch.float32
    assert error(out[0], want) < 1e-3  # rounding the output to float16
    assert error(state[0], want_state) < 1e-5
