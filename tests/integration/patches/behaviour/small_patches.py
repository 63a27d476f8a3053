"""Answers of the smaller patched places of vLLM; JSON on stdout.

Runs in an environment with vLLM, with the FlashQLA checkout on PYTHONPATH as the unit has it.
Where vLLM would ask the device, the device is said to be CUDA with a capability: nothing is
launched, only decisions are read.
"""

from __future__ import annotations

import json
import os
import types
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.flashinfer import FlashInferBackend


def told(call: Any, *arguments: Any) -> Any:
    """Return what a call returns, or the text of its error."""
    try:
        return call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Device:
    """Stands for vLLM's current platform: CUDA, of one capability."""

    def __init__(self, capability: int | None) -> None:
        self.capability = capability

    def is_cuda(self) -> bool:
        return self.capability is not None

    def is_device_capability(self, capability: int) -> bool:
        return self.capability == capability

    def is_device_capability_family(self, capability: int) -> bool:
        return self.capability is not None and self.capability // 10 == capability // 10


def floors() -> dict[str, bool]:
    return {
        f"{major}.{minor}": FlashInferBackend.supports_compute_capability(
            DeviceCapability(major, minor)
        )
        for major, minor in ((7, 0), (7, 2), (7, 5), (8, 0), (9, 0), (12, 1), (13, 0))
    }


def backends() -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for where, capability in (("cpu", None), ("sm75", 75), ("sm90", 90)):
        gdn.current_platform = Device(capability)
        for name in ("auto", "triton", "flashqla_legacy", "FlashQLA_Legacy ", "flashqla", ""):
            for dims in ((128, 128), (128, 64)):
                model = types.SimpleNamespace(
                    linear_key_head_dim=dims[0], linear_value_head_dim=dims[1]
                )
                config = types.SimpleNamespace(
                    additional_config={"gdn_prefill_backend": name},
                    model_config=types.SimpleNamespace(hf_text_config=model),
                )
                key = f"{where} {name!r} {dims[0]}/{dims[1]}"
                answers[key] = told(gdn._resolve_gdn_prefill_backend, config)
    return answers


def recurrence(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """Run the gated delta rule of one sequence in float64, written from its definition.

    S <- exp(g) S; S <- S + beta (v - S k) k^T; o = S q / sqrt(dim), state [heads, value, key].
    """
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    repeat = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    outputs = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("h,hv,hk->hvk", beta[t], error, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs), state


def ragged() -> dict[str, Any]:
    """Compare the split of a ragged batch with the recurrence, sequence by sequence."""
    from vllm.model_executor.layers.mamba.ops import gdn_flashqla_legacy as legacy

    torch.manual_seed(3)
    lengths = [5, 0, 1, 17]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    tokens, key_heads, heads, dim = sum(lengths), 2, 6, 16
    unit = torch.nn.functional.normalize
    q = unit(torch.randn(1, tokens, key_heads, dim), dim=-1)
    k = unit(torch.randn(1, tokens, key_heads, dim), dim=-1)
    v = torch.randn(1, tokens, heads, dim)
    g = -torch.rand(1, tokens, heads)
    beta = torch.rand(1, tokens, heads)
    state = torch.randn(len(lengths), heads, dim, dim)
    kept = state.clone()
    result: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float16):
        out, final = legacy.chunk_gated_delta_rule_flashqla_legacy(
            *(x.to(dtype) for x in (q, k, v)), g, beta, state, bounds
        )
        worst = 0.0
        for index, length in enumerate(lengths):
            start = int(bounds[index])
            part = slice(start, start + length)
            if not length:
                assert torch.equal(final[index], kept[index])
                continue
            expected, expected_state = recurrence(
                q[0, part], k[0, part], v[0, part], g[0, part], beta[0, part], kept[index]
            )
            for got, want in ((out[0, part], expected), (final[index], expected_state)):
                worst = max(worst, float((got.double() - want).norm() / want.norm()))
        result[str(dtype)] = [worst, str(out.dtype), str(final.dtype), list(out.shape)]
    assert torch.equal(state, kept), "the caller's state was changed"
    # one sequence: the boundaries need not be known
    one, _final = legacy.chunk_gated_delta_rule_flashqla_legacy(q, k, v, g, beta, state[:1], None)
    expected, _ = recurrence(q[0], k[0], v[0], g[0], beta[0], kept[0])
    result["one"] = float((one[0].double() - expected).norm() / expected.norm())
    return result


def custom_op() -> list[float]:
    """Run the op that the model calls, with and without an output buffer."""
    op = gdn.ChunkGatedDeltaRule.__new__(gdn.ChunkGatedDeltaRule)
    torch.manual_seed(4)
    q = torch.nn.functional.normalize(torch.randn(1, 4, 2, 16), dim=-1)
    v = torch.randn(1, 4, 2, 16)
    g, beta, state = -torch.rand(1, 4, 2), torch.rand(1, 4, 2), torch.zeros(1, 2, 16, 16)
    buffer = torch.zeros(6, 2, 16)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    out, final = op.forward_flashqla_legacy(
        q,
        q,
        v,
        g,
        beta,
        state,
        True,
        bounds,
        use_qk_l2norm_in_kernel=False,
        core_attn_out=buffer,
    )
    _out, none = op.forward_flashqla_legacy(
        q, q, v, g, beta, state, False, bounds, use_qk_l2norm_in_kernel=False
    )
    expected, expected_state = recurrence(q[0], q[0], v[0], g[0], beta[0], state[0])
    assert none is None
    assert not buffer[4:].any()
    return [
        float((out[0] - expected).abs().max()),
        float((buffer[:4] - expected).abs().max()),
        float((final[0] - expected_state).abs().max()),
    ]


def sync_modes() -> dict[str, Any]:
    from vllm.v1.worker import gpu_model_runner

    answers: dict[str, Any] = {}
    for mode in ("auto", "safe", "nosync", "fast", None):
        if mode is None:
            os.environ.pop("VLLM_SM75_SPEC_SYNC_MODE", None)
        else:
            os.environ["VLLM_SM75_SPEC_SYNC_MODE"] = mode
        for capability in (None, 75, 80):
            gpu_model_runner.current_platform = Device(capability)
            for drafts in (0, 3):
                runner = types.SimpleNamespace(num_spec_tokens=drafts)
                answers[f"{mode} {capability} {drafts}"] = told(
                    gpu_model_runner.GPUModelRunner._get_sync_before_spec_inputs, runner
                )
    return answers


def drafts() -> dict[str, Any]:
    from vllm.model_executor.models import qwen3_5_mtp

    answers: dict[str, Any] = {}
    for value in ("0", "1"):
        os.environ["VLLM_QWOPUS_MTP_BF16_DRAFT"] = value
        for name in (None, "fp8", "awq", "modelopt_fp4"):
            config = None if name is None else types.SimpleNamespace(get_name=lambda n=name: n)
            kept = qwen3_5_mtp._get_fc_quant_config(config)
            answers[f"{value} {name}"] = kept is config and config is not None
    return answers


def main() -> None:
    answers: dict[str, Any] = {"floors": floors(), "backends": backends()}
    known = envs.environment_variables
    answers["known"] = [
        name in known for name in ("VLLM_SM75_SPEC_SYNC_MODE", "VLLM_QWOPUS_MTP_BF16_DRAFT")
    ]
    if all(answers["known"]):
        answers |= {"ragged": ragged(), "op": custom_op()}
        answers |= {"sync": sync_modes(), "drafts": drafts()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
