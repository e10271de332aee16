# SPDX-License-Identifier: Apache-2.0
"""The small files of a synthetic checkpoint: model index, configs, tokenizer and processor.

The tokenizer is byte-level BPE without merges: every text has tokens and no vocabulary has to be shipped.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_h3_plugin.checkpoint.configs import DIFFUSERS_CLASS, NATIVE_CLASS, TextEncoderConfig
from vllm_h3_plugin.checkpoint.synthetic.spec import Partition, SynthSpec

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def write_json(path: Path, value: object) -> None:
    """Write indented JSON, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes of byte-level BPE (GPT-2's ``bytes_to_unicode``), sorted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return sorted([chr(code) for code in printable] + [chr(0x100 + i) for i in range(256 - len(printable))])


def _vocabulary() -> dict[str, int]:
    return {letter: i for i, letter in enumerate(_byte_alphabet())}


def special_ids() -> dict[str, int]:
    """Token id of each special token: they follow the 256 bytes."""
    return {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}


def _write_tokenizer(folder: Path) -> None:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    ids = special_ids()
    vocabulary = _vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in ids.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": model,
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 262144,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "add_bos_token": False,
        "errors": "replace",
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "added_tokens_decoder": {str(number): {"content": token, **flags} for token, number in ids.items()},
    }
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")


def _write_processor(folder: Path, text: TextEncoderConfig) -> None:
    vision = text.vision
    image: dict[str, Any] = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "size": {"shortest_edge": 1024, "longest_edge": 65536},
        "processor_class": "Qwen3VLProcessor",
    }
    video = {**image, "size": {"shortest_edge": 1024, "longest_edge": 8 * 65536}}
    write_json(folder / "preprocessor_config.json", {**image, "image_processor_type": "Qwen2VLImageProcessorFast"})
    write_json(folder / "video_preprocessor_config.json", {**video, "video_processor_type": "Qwen3VLVideoProcessor"})
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _text_config(config: TextEncoderConfig) -> dict[str, Any]:
    ids = special_ids()
    text = {name: value for name, value in asdict(config).items() if name != "vision"}
    half = config.head_dim // 2
    side = half // 16 * 5 if half >= 16 else half // 3  # Qwen3-VL splits 64 pairs into 24 + 20 + 20
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "qwen3_vl_text",
            **text,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "attention_bias": False,
            "rope_theta": 5000000.0,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [half - 2 * side, side, side],
            },
            "dtype": "bfloat16",
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            **asdict(config.vision),
            "deepstack_visual_indexes": list(config.vision.deepstack_visual_indexes),
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def model_index(partition: Partition | None, spec: SynthSpec) -> dict[str, Any]:
    """``model_index.json`` of a partition, or of the root that holds both (None)."""
    dit = ["vllm_omni", NATIVE_CLASS] if spec.layout == "native" else ["diffusers", DIFFUSERS_CLASS]
    release: dict[str, Any] = {"partitions": [item.folder for item in spec.partitions]}
    if partition is not None:
        shifts = {"video": 12.0, "audio": 3.0}
        release = {"partition": partition.name, "tasks": list(partition.tasks), "sigma_shift_scales": shifts}
    return {
        "_class_name": "MiniMaxH3Pipeline",
        "_diffusers_version": "0.40.0",
        "_minimax_h3": release,
        "transformer": dit,
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "video_vae": ["remote", "SyntheticH3VideoVAE"],
        "audio_vae": ["remote", "SyntheticH3AudioVAE"],
    }


def write_side_files(root: Path, partition: Partition, spec: SynthSpec) -> None:
    """Write everything of a partition that is neither a weight shard nor a VAE."""
    write_json(root / "model_index.json", model_index(partition, spec))
    dit = spec.dit.to_native() if spec.layout == "native" else spec.dit.to_diffusers()
    write_json(root / "transformer" / "config.json", dit)
    write_json(root / "text_encoder" / "config.json", _text_config(spec.text))
    _write_tokenizer(root / "tokenizer")
    _write_tokenizer(root / "processor")
    _write_processor(root / "processor", spec.text)
