"""What thinking budget a request ends up with; JSON on stdout.

Runs in an environment with vLLM. argv: folder of a model configuration with its tokenizer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm.config.reasoning import ReasoningConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor


def processor(model: str, reasoning: dict[str, Any], **more: Any) -> InputProcessor:
    arguments = EngineArgs(
        model=model,
        dtype="bfloat16",
        max_model_len=4096,
        skip_mm_profiling=True,
        mamba_ssm_cache_dtype="float32",
        reasoning_config=ReasoningConfig(**reasoning),
        **more,
    )
    return InputProcessor(arguments.create_engine_config())


def budget(inputs: InputProcessor, asked: int | None) -> int | None:
    parameters = SamplingParams(max_tokens=5, thinking_token_budget=asked)
    request = inputs.process_inputs("r", {"prompt_token_ids": [20, 21]}, parameters, ("generate",))
    assert parameters.thinking_token_budget == asked or asked == -1  # the caller's own is kept
    assert request.sampling_params is not None
    return request.sampling_params.thinking_token_budget


def sentence(error: Exception) -> str:
    return " ".join(str(error).split())


def refusal(inputs: InputProcessor) -> str:
    try:
        return f"accepted: {inputs._get_default_thinking_token_budget()}"
    except ValueError as error:
        return sentence(error)


def main() -> None:
    model = sys.argv[1]
    answers: dict[str, Any] = {}
    try:
        inputs = processor(model, {"default_thinking_token_budget": 512}, reasoning_parser="qwen3")
    except Exception as error:  # any refusal is an answer here
        print(json.dumps({"refused": sentence(error)}))
        return
    answers["none"] = budget(inputs, None)
    answers["own"] = budget(inputs, 7)
    answers["zero"] = budget(inputs, 0)
    answers["unlimited"] = budget(inputs, -1)
    without = processor(model, {}, reasoning_parser="qwen3")
    answers["no_default"] = budget(without, None)
    answers["no_default_unlimited"] = budget(without, -1)
    try:
        processor(model, {"default_thinking_token_budget": -3}, reasoning_parser="qwen3")
        answers["negative"] = "accepted"
    except Exception as error:
        answers["negative"] = sentence(error)
    inputs.use_v2_model_runner = True
    answers["v2"] = refusal(inputs)
    inputs.use_v2_model_runner = False
    inputs.vllm_config.reasoning_config._enabled = False
    answers["tokens_unknown"] = refusal(inputs)
    try:
        SamplingParams(thinking_token_budget=-2)
        answers["minus_two"] = "accepted"
    except Exception as error:
        answers["minus_two"] = sentence(error)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
