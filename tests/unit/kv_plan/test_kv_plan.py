"""The planner against vLLM 0.24.0's own planning (planned.csv) and its own scheduler.

planned.csv was computed with the released wheel on a machine without a GPU: the model on the meta
device, FlashInfer's floor at 7.5, the bytes for the KV cache as an input.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import kv_plan
from vllm_turing.kv_plan import Plan, PlanError, Wish

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "text_config": {
        "num_hidden_layers": 64, "full_attention_interval": 4, "hidden_size": 5120,
        "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "vocab_size": 248320,
        "mtp_num_hidden_layers": 1,
    },
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27,
                      "spatial_merge_size": 2, "out_hidden_size": 5120},
}  # fmt: skip
MODEL = kv_plan.model_of(CONFIG)
#: 162 blocks of the reference host.
REFERENCE_BYTES = 4_512_153_600
REFERENCE = Wish(2, "fp8_e4m3", 100000, 3)

CASES = list(csv.DictReader((Path(__file__).parent / "planned.csv").open()))


def number(text: str) -> int | None:
    return int(text) if text else None


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_the_plan_is_vllms_own(case: dict[str, str]) -> None:
    wish = Wish(
        tensor_parallel_size=int(case["tp"]),
        kv_cache_dtype=case["kv"],
        max_model_len=int(case["length"]),
        num_speculative_tokens=int(case["mtp"]),
        enable_prefix_caching=case["prefix"] == "yes",
        mamba_ssm_cache_dtype=case["ssm"],
        block_size=number(case["user_block"]),
        max_num_batched_tokens=int(case["batched"]),
        num_gpu_blocks_override=number(case["override"]),
    )
    found = kv_plan.plan(MODEL, wish, int(case["bytes"]))
    assert found.starts == (case["starts"] == "yes")
    assert found.mamba_cache_mode == case["mode"]
    assert found.block_size == int(case["block"])
    assert found.mamba_page_unpadded_bytes == int(case["state"])
    assert found.attn_bytes_per_token_per_layer == int(case["token"])
    assert found.page_size_bytes == int(case["page"])
    assert found.layers_per_group == [int(part) for part in case["layers"].split("+")]
    assert found.num_groups == 4
    assert found.bytes_per_block == int(case["block_bytes"])
    assert found.num_blocks == int(case["blocks"])
    assert found.blocks_per_request == int(case["request"])
    assert found.kv_cache_size_tokens == number(case["tokens"])
    assert found.max_concurrency == (float(case["concurrency"]) if case["concurrency"] else None)
    if case["effective"]:
        assert found.max_model_len == int(case["effective"])


def test_the_table_is_whole() -> None:
    assert len(CASES) == 38
    assert sum(case["starts"] == "no" for case in CASES) >= 5


def planned(kv: str, length: int, blocks: int, mtp: int = 3, prefix: bool = True) -> Plan:
    wish = Wish(2, kv, length, mtp, prefix, num_gpu_blocks_override=blocks)
    return kv_plan.plan(MODEL, wish, REFERENCE_BYTES)


@pytest.mark.parametrize(
    ("kv", "mtp", "prefix", "fewest"),
    [
        ("fp8_e4m3", 3, True, 79), ("auto", 3, True, 141), ("fp8_e4m3", 0, True, 71),
        ("fp8_e4m3", 1, True, 74), ("fp8_e4m3", 3, False, 76), ("fp8_e4m3", 0, False, 68),
    ],
)  # fmt: skip
def test_what_vllms_scheduler_could_not_finish_is_called_a_stall(
    kv: str, mtp: int, prefix: bool, fewest: int
) -> None:
    """Measured with the real scheduler: ``fewest`` blocks finish a request, one less never does."""
    enough = planned(kv, 100000, fewest, mtp, prefix)
    assert enough.starts and not enough.stalls
    short = planned(kv, 100000, fewest - 1, mtp, prefix)
    assert short.starts and short.stalls
    assert not planned(kv, 100000, fewest - 2, mtp, prefix).starts


@pytest.mark.parametrize(
    ("kv", "auto", "usable"), [("fp8_e4m3", 235200, 233600), ("auto", 117600, 116800)]
)
def test_vllms_automatic_length_stalls_and_is_not_recommended(
    kv: str, auto: int, usable: int
) -> None:
    found = planned(kv, -1, 162)
    assert found.max_model_len == auto
    assert found.stalls
    assert found.usable_max_model_len == usable
    assert f"{usable}" in (found.why or "")
    again = planned(kv, usable, 162)
    assert again.starts and not again.stalls


def test_every_advice_is_good() -> None:
    wish = Wish(2, "auto", 200000, 3)
    found = kv_plan.plan(MODEL, wish, REFERENCE_BYTES)
    hints = dict(hint.split(" ") for hint in kv_plan.advice(MODEL, wish, found, None))
    assert hints == {"max-model-len": "116800", "kv-cache-dtype": "fp8_e4m3"}
    assert not kv_plan.plan(MODEL, Wish(2, "auto", 116800, 3), REFERENCE_BYTES).stalls
    assert not kv_plan.plan(MODEL, Wish(2, "fp8_e4m3", 200000, 3), REFERENCE_BYTES).stalls


def test_the_reference_host_fits_its_cards() -> None:
    card = kv_plan.memory(CONFIG, REFERENCE, 22528, 0.92, kv_plan.REST_MIB)
    assert card.weights / kv_plan.MIB == pytest.approx(14940, abs=60)
    found = kv_plan.plan(MODEL, REFERENCE, card.available)
    assert found.starts and not found.stalls
    assert found.num_blocks == pytest.approx(162, abs=12)
    lines = kv_plan.bar(card, found)
    assert lines[0].count("#") > lines[0].count("=") > 0
    assert "22,528 MiB" in lines[0]


def test_all_weights_are_those_of_the_download() -> None:
    """The reference document: about 29 GB, of it 879 MB vision and 456 MB MTP."""
    one = kv_plan.weights_bytes(CONFIG, Wish(1, num_speculative_tokens=3))
    without = kv_plan.weights_bytes(CONFIG, Wish(1))
    assert (one - without) / kv_plan.MIB == pytest.approx(455, abs=5)
    blind = kv_plan.weights_bytes({**CONFIG, "vision_config": None}, Wish(1))
    assert (without - blind) / kv_plan.MIB == pytest.approx(879, abs=5)


def test_a_card_that_is_too_small_is_told_what_would_fit() -> None:
    card = kv_plan.memory(CONFIG, REFERENCE, 22528, 0.80, kv_plan.REST_MIB)
    found = kv_plan.plan(MODEL, REFERENCE, card.available)
    assert not found.starts
    hints = kv_plan.advice(MODEL, REFERENCE, found, card)
    share = next(hint for hint in hints if hint.startswith("gpu-memory-utilization "))
    more = kv_plan.memory(CONFIG, REFERENCE, 22528, float(share.split()[1]), kv_plan.REST_MIB)
    again = kv_plan.plan(MODEL, REFERENCE, more.available)
    assert again.starts and not again.stalls


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(5), "does not divide"),
        (Wish(2, "fp4"), "'fp4' is unknown"),
        (Wish(2, num_speculative_tokens=-1), "negative"),
    ],
)
def test_what_is_no_wish_is_refused(wish: Wish, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        kv_plan.plan(MODEL, wish, REFERENCE_BYTES)


def test_another_kind_of_model_is_refused() -> None:
    with pytest.raises(PlanError, match="only hybrid models"):
        kv_plan.model_of({"num_hidden_layers": 32, "layer_types": ["full_attention"] * 32})


def test_the_program_prints_the_reference_hosts_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    flags = [
        "--config", str(path), "--tensor-parallel-size", "2", "--max-model-len", "100000",
        "--num-speculative-tokens", "3", "--enable-prefix-caching", "--json",
        "--available-bytes", str(REFERENCE_BYTES), "--kv-cache-dtype",
    ]  # fmt: skip
    assert kv_plan.main([*flags, "fp8_e4m3"]) == 0
    fp8 = json.loads(capsys.readouterr().out)
    assert (fp8["num_blocks"], fp8["block_size"]) == (162, 1600)
    assert (fp8["kv_cache_size_tokens"], round(fp8["max_concurrency"], 3)) == (207692, 2.077)
    assert kv_plan.main([*flags, "float16"]) == 0
    fp16 = json.loads(capsys.readouterr().out)
    assert (fp16["num_blocks"], fp16["block_size"]) == (162, 800)
    assert fp16["kv_cache_size_tokens"] == 115714
    assert kv_plan.main(["--config", str(path), "--gpu-memory", "11264"]) == 1
    assert "DOES NOT START" in capsys.readouterr().out
    assert kv_plan.main(["--config", str(tmp_path / "none"), "--gpu-memory", "1"]) == 2
