"""Write a tiny Qwen3.5 model with random weights, using the standard library only.

The lab serves it through the real engine in place of the real model. It has the same architecture
(``Qwen3_5ForConditionalGeneration``: three linear-attention layers to one full-attention layer, a
vision tower, one MTP layer), the same set of files and the same naming of shards as a real
repository of the family, in about one megabyte. Tensor names and shapes are those that
transformers 5.12.1 gives this architecture; the MTP ones those that vLLM 0.24.0 loads.

The weights are random with one intent: the output layer prefers whole words and never samples a
control token, so that answers are readable nonsense whose length the caller decides.

The same arguments give the same bytes on every machine: numbers come from integer arithmetic, and
nothing depends on the clock, the locale or the order of a set.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

SEED = 20260718
VOCABULARY = 384
LAYERS = 4
HIDDEN = 64
INTERMEDIATE = 128
HEADS = 2
KV_HEADS = 1
HEAD_DIM = 64
LINEAR_KEY_HEADS = 2
LINEAR_VALUE_HEADS = 4
LINEAR_HEAD_DIM = 32
CONV_KERNEL = 4
VISION_HIDDEN = 32
VISION_INTERMEDIATE = 64
VISION_POSITIONS = 64
PATCH = 16
TEMPORAL_PATCH = 2
MERGE = 2

# The added tokens of the Qwen3.5 family in their order; the last four are plain text to a decoder
# that skips special tokens, because the reasoning and tool parsers have to see them.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEXT_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
ADDED_TOKENS = SPECIAL_TOKENS + TEXT_TOKENS

# Text from which the merges are learned, so that common words are single tokens.
CORPUS = (
    "the quick brown fox jumps over the lazy dog and the small model answers with some words that "
    "are not true but can be read by a person who looks at the screen of the host and asks what is "
    "served there today while the driver and the engine and the memory are checked for real again"
)

CHAT_TEMPLATE = r"""{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}
{%- if part.type == 'image' or 'image_url' in part or 'image' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools %}<|im_start|>system
# Tools

<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

Call a function like this:
<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>
{%- if messages[0].role == 'system' -%}
{{ '\n\n' }}{{ text_of(messages[0].content) }}
{%- endif -%}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ text_of(messages[0].content) }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}<|im_start|>user
{{ text_of(message.content) }}<|im_end|>
{% elif message.role == 'assistant' -%}<|im_start|>assistant
{{ text_of(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function is defined else call -%}
{{ '\n' }}<tool_call>
<function={{ function.name }}>
{% if function.arguments is mapping -%}
{% for key, value in function.arguments | items -%}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor -%}
{%- endif -%}
</function>
</tool_call>
{%- endfor -%}<|im_end|>
{% elif message.role == 'tool' -%}<|im_start|>user
<tool_response>
{{ text_of(message.content) }}
</tool_response><|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% else -%}
<think>
{% endif -%}
{%- endif -%}
"""

README = """---
license: apache-2.0
tags: [stand-in]
---
# A stand-in

This is **not** the model of this name. It is a one-megabyte model with random weights and the same
architecture and file layout, which the lab of vllm-turing serves in its place. Its answers mean
nothing. It was written by `python -m lab.tiny_model`.
"""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor to write: its name, its shape, and how its values are drawn.

    ``spread`` is the half width of the uniform distribution around ``centre``; ``rows`` optionally
    gives the spread of each row instead.
    """

    name: str
    shape: Shape
    spread: float = 0.0
    centre: float = 0.0
    rows: tuple[float, ...] = ()

    def values(self, rng: random.Random) -> bytes:
        """Return the values as little-endian BF16, which is the upper half of a float32."""
        count = 1
        for size in self.shape:
            count *= size
        per_row = count // len(self.rows) if self.rows else count
        out = bytearray()
        for spread in self.rows or (self.spread,):
            for _ in range(per_row):
                # 16 random bits: exact in every float format, so no machine rounds differently.
                unit = (rng.getrandbits(16) - 32768) / 32768
                out += struct.pack("<f", self.centre + spread * unit)[2:]
        return bytes(out)


def byte_alphabet() -> dict[int, str]:
    """Return the printable character that byte-level BPE uses for every byte (as in GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {byte: chr(byte) for byte in printable}
    spare = 256
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(spare)
            spare += 1
    return alphabet


def learn_merges(corpus: str, count: int) -> list[tuple[str, str]]:
    """Learn ``count`` merges from the words of a text; ties go to the pair first in order.

    :raises ValueError: the text is too short for so many merges
    """
    alphabet = byte_alphabet()
    words = [
        [alphabet[byte] for byte in (" " * (index > 0) + word).encode()]
        for index, word in enumerate(corpus.split())
    ]
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        seen: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in pairwise(word):
                seen[pair] = seen.get(pair, 0) + 1
        if not seen:
            raise ValueError(f"the corpus gives only {len(merges)} merges of the {count} wanted")
        best = min(seen, key=lambda pair: (-seen[pair], pair))
        merges.append(best)
        words = [_merged(word, best) for word in words]
    return merges


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    """Join every occurrence of ``pair`` in a word."""
    out: list[str] = []
    index = 0
    while index < len(word):
        if tuple(word[index : index + 2]) == pair:
            out.append("".join(pair))
            index += 2
        else:
            out.append(word[index])
            index += 1
    return out


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the base vocabulary (bytes, then merges) and the merges; added tokens follow it."""
    merges = learn_merges(CORPUS, VOCABULARY - 256 - len(ADDED_TOKENS))
    tokens = [*byte_alphabet().values(), *("".join(pair) for pair in merges)]
    return {token: index for index, token in enumerate(tokens)}, merges


def token_id(token: str) -> int:
    """Return the id of an added token."""
    return VOCABULARY - len(ADDED_TOKENS) + ADDED_TOKENS.index(token)


def _added_token(token: str) -> dict[str, Any]:
    return {
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": token in SPECIAL_TOKENS,
    }


def tokenizer_files() -> dict[str, str]:
    """Return the tokenizer's files: one fast tokenizer, its parts and its settings."""
    vocab, merges = vocabulary()
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id(t), **_added_token(t)} for t in ADDED_TOKENS],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(token_id(t)): _added_token(t) for t in ADDED_TOKENS},
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "image_token": "<|image_pad|>",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3VLProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    return {
        "tokenizer.json": _json(tokenizer),
        "tokenizer_config.json": _json(config),
        "vocab.json": _json(vocab),
        "merges.txt": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges),
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def config_files() -> dict[str, str]:
    """Return config.json and the generation and processor settings."""
    text_config = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": token_id("<|im_end|>"),
        "full_attention_interval": 4,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "layer_types": [
            "full_attention" if _is_full_attention(layer) else "linear_attention"
            for layer in range(LAYERS)
        ],
        "linear_conv_kernel_dim": CONV_KERNEL,
        "linear_key_head_dim": LINEAR_HEAD_DIM,
        "linear_num_key_heads": LINEAR_KEY_HEADS,
        "linear_num_value_heads": LINEAR_VALUE_HEADS,
        "linear_value_head_dim": LINEAR_HEAD_DIM,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }
    vision_config = {
        "deepstack_visual_indexes": [],
        "depth": 1,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": VISION_HIDDEN,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": VISION_INTERMEDIATE,
        "model_type": "qwen3_5_vision",
        "num_heads": 2,
        "num_position_embeddings": VISION_POSITIONS,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
    }
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": token_id("<|image_pad|>"),
        "model_type": "qwen3_5",
        "text_config": text_config,
        "tie_word_embeddings": False,
        "transformers_version": "5.12.1",
        "video_token_id": token_id("<|video_pad|>"),
        "vision_config": vision_config,
        "vision_end_token_id": token_id("<|vision_end|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
    }
    generation = {
        "bos_token_id": token_id("<|endoftext|>"),
        "do_sample": True,
        "eos_token_id": [token_id("<|im_end|>"), token_id("<|endoftext|>")],
        "pad_token_id": token_id("<|endoftext|>"),
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "5.12.1",
    }
    pixels = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": MERGE,
        "patch_size": PATCH,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 65536, "shortest_edge": 1024},
        "temporal_patch_size": TEMPORAL_PATCH,
    }
    return {
        "config.json": _json(config),
        "generation_config.json": _json(generation),
        "preprocessor_config.json": _json(
            {
                "image_processor_type": "Qwen2VLImageProcessorFast",
                "max_pixels": 65536,
                "min_pixels": 1024,
                **pixels,
            }
        ),
        "video_preprocessor_config.json": _json(
            {"video_processor_type": "Qwen3VLVideoProcessor", **pixels}
        ),
    }


def _is_full_attention(layer: int) -> bool:
    """Every fourth layer attends to all tokens, as in the real model."""
    return layer % 4 == 3


def _linear(name: str, rows: int, columns: int) -> Tensor:
    """Return a weight matrix with the usual initial spread (standard deviation 0.02)."""
    return Tensor(f"{name}.weight", (rows, columns), spread=0.02 * 3**0.5)


def _mlp(prefix: str) -> list[Tensor]:
    return [
        _linear(f"{prefix}.mlp.gate_proj", INTERMEDIATE, HIDDEN),
        _linear(f"{prefix}.mlp.up_proj", INTERMEDIATE, HIDDEN),
        _linear(f"{prefix}.mlp.down_proj", HIDDEN, INTERMEDIATE),
    ]


def _norms(prefix: str) -> list[Tensor]:
    # Stored as the distance from one: zero is the identity.
    return [
        Tensor(f"{prefix}.input_layernorm.weight", (HIDDEN,)),
        Tensor(f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)),
    ]


def _full_attention(prefix: str) -> list[Tensor]:
    return [
        # Twice the heads: the second half is the output gate.
        _linear(f"{prefix}.self_attn.q_proj", 2 * HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        _linear(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
        Tensor(f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,)),
        Tensor(f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,)),
    ]


def _linear_attention(prefix: str) -> list[Tensor]:
    keys = LINEAR_KEY_HEADS * LINEAR_HEAD_DIM
    values = LINEAR_VALUE_HEADS * LINEAR_HEAD_DIM
    name = f"{prefix}.linear_attn"
    return [
        _linear(f"{name}.in_proj_qkv", 2 * keys + values, HIDDEN),
        _linear(f"{name}.in_proj_z", values, HIDDEN),
        _linear(f"{name}.in_proj_a", LINEAR_VALUE_HEADS, HIDDEN),
        _linear(f"{name}.in_proj_b", LINEAR_VALUE_HEADS, HIDDEN),
        _linear(f"{name}.out_proj", HIDDEN, values),
        Tensor(f"{name}.conv1d.weight", (2 * keys + values, 1, CONV_KERNEL), spread=0.5),
        Tensor(f"{name}.A_log", (LINEAR_VALUE_HEADS,), spread=0.7, centre=1.8),
        Tensor(f"{name}.dt_bias", (LINEAR_VALUE_HEADS,), centre=1.0),
        Tensor(f"{name}.norm.weight", (LINEAR_HEAD_DIM,), centre=1.0),
    ]


def language_layer(layer: int) -> list[Tensor]:
    """Return the tensors of one decoder layer."""
    prefix = f"model.language_model.layers.{layer}"
    mixer = _full_attention if _is_full_attention(layer) else _linear_attention
    return [*_norms(prefix), *mixer(prefix), *_mlp(prefix)]


def output_layer() -> Tensor:
    """Return the output matrix: words likely, other bytes unlikely, control tokens never likely."""
    vocab, _ = vocabulary()
    spreads = [0.6 if len(token) > 2 and token.startswith("Ġ") else 0.02 for token in vocab]
    return Tensor(
        "lm_head.weight", (VOCABULARY, HIDDEN), rows=(*spreads, *([0.0] * len(ADDED_TOKENS)))
    )


def vision_tensors() -> list[Tensor]:
    """Return the tensors of the vision tower (one block)."""
    block = "model.visual.blocks.0"
    merger = "model.visual.merger"
    wide = VISION_HIDDEN * MERGE * MERGE

    def affine(name: str, rows: int, columns: int) -> list[Tensor]:
        return [_linear(name, rows, columns), Tensor(f"{name}.bias", (rows,))]

    def norm(name: str) -> list[Tensor]:
        return [
            Tensor(f"{name}.weight", (VISION_HIDDEN,), centre=1.0),
            Tensor(f"{name}.bias", (VISION_HIDDEN,)),
        ]

    patch_embed = "model.visual.patch_embed.proj"
    return [
        Tensor(
            f"{patch_embed}.weight",
            (VISION_HIDDEN, 3, TEMPORAL_PATCH, PATCH, PATCH),
            spread=0.02 * 3**0.5,
        ),
        Tensor(f"{patch_embed}.bias", (VISION_HIDDEN,)),
        _linear("model.visual.pos_embed", VISION_POSITIONS, VISION_HIDDEN),
        *norm(f"{block}.norm1"),
        *norm(f"{block}.norm2"),
        *affine(f"{block}.attn.qkv", 3 * VISION_HIDDEN, VISION_HIDDEN),
        *affine(f"{block}.attn.proj", VISION_HIDDEN, VISION_HIDDEN),
        *affine(f"{block}.mlp.linear_fc1", VISION_INTERMEDIATE, VISION_HIDDEN),
        *affine(f"{block}.mlp.linear_fc2", VISION_HIDDEN, VISION_INTERMEDIATE),
        *norm(f"{merger}.norm"),
        *affine(f"{merger}.linear_fc1", wide, wide),
        *affine(f"{merger}.linear_fc2", HIDDEN, wide),
    ]


def mtp_tensors() -> list[Tensor]:
    """Return the tensors of the multi-token-prediction layer."""
    prefix = "mtp.layers.0"
    return [
        _linear("mtp.fc", HIDDEN, 2 * HIDDEN),
        Tensor("mtp.pre_fc_norm_embedding.weight", (HIDDEN,)),
        Tensor("mtp.pre_fc_norm_hidden.weight", (HIDDEN,)),
        Tensor("mtp.norm.weight", (HIDDEN,)),
        *_norms(prefix),
        *_full_attention(prefix),
        *_mlp(prefix),
    ]


def shards() -> dict[str, list[Tensor]]:
    """Return the weight files in order: one language shard a layer, then vision and MTP."""
    files: dict[str, list[Tensor]] = {}
    for layer in range(LAYERS):
        tensors = language_layer(layer)
        if layer == 0:
            embed = Tensor(
                "model.language_model.embed_tokens.weight", (VOCABULARY, HIDDEN), spread=1.0
            )
            tensors = [embed, *tensors]
        if layer == LAYERS - 1:
            tensors += [Tensor("model.language_model.norm.weight", (HIDDEN,)), output_layer()]
        files[f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors"] = tensors
    files["visual.safetensors"] = vision_tensors()
    files["mtp.safetensors"] = mtp_tensors()
    return files


def safetensors(tensors: Iterable[Tensor], rng: random.Random) -> bytes:
    """Return one safetensors file: header length, header padded to 8 bytes, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for tensor in tensors:
        values = tensor.values(rng)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(values)],
        }
        data += values
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(data)


def model_files(seed: int = SEED) -> dict[str, bytes]:
    """Return every file of the model: name to content.

    :param seed: another seed gives another model of the same shape
    """
    files: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    total = 0
    rng = random.Random(seed)
    for name, tensors in shards().items():
        files[name] = safetensors(tensors, rng)
        for tensor in tensors:
            weight_map[tensor.name] = name
        (header,) = struct.unpack_from("<Q", files[name])
        total += len(files[name]) - 8 - header
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    texts = {
        ".gitattributes": "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        "tokenizer.json filter=lfs diff=lfs merge=lfs -text\n",
        "README.md": README,
        "model.safetensors.index.json": _json(index),
        **config_files(),
        **tokenizer_files(),
    }
    files.update({name: text.encode() for name, text in texts.items()})
    return dict(sorted(files.items()))


def write_model(folder: Path, seed: int = SEED) -> Mapping[str, int]:
    """Write the model into a folder and return the size of each file in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    for name, content in model_files(seed).items():
        (folder / name).write_bytes(content)
        sizes[name] = len(content)
    return sizes


def _json(value: object) -> str:
    """Return readable JSON in a fixed form."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the model into the folder named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.tiny_model", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(argv)
    sizes = write_model(options.folder, options.seed)
    print(f"{options.folder}: {len(sizes)} files, {sum(sizes.values())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
