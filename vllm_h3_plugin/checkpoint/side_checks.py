# SPDX-License-Identifier: Apache-2.0
"""Check what is not a network with known tensors: the VAEs' folders, the tokenizer and the processor.

The VAEs' modules are code that comes with the checkpoint, so only their configs, headers and sizes can be checked.
"""

from __future__ import annotations

import ast
from pathlib import Path

from vllm_h3_plugin.checkpoint.configs import AUDIO_CHANNELS, VIDEO_CHANNELS
from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.json_file import LFS_FIX, LFS_PREFIX, LFS_WHY, read_json
from vllm_h3_plugin.checkpoint.safetensors_header import read_header
from vllm_h3_plugin.checkpoint.shard_set import ShardSet

CHANNELS = {"video_vae": VIDEO_CHANNELS, "audio_vae": AUDIO_CHANNELS}
_RELEASE = "Take this file from the release that the weights came from."
_FOLDER = "Download this folder of the release."
_READ_ACCESS = "Give the user that runs this read access to it."


def has_folder(folder: Path, log: FaultLog) -> bool:
    """Whether a part's folder is there; if not, that is a fault."""
    if folder.is_dir():
        return True
    log.add("part_missing", folder, why="the checkpoint needs this folder", fix=_FOLDER)
    return False


def check_vae(folder: Path, log: FaultLog) -> ShardSet:
    """Config, remote code and weight headers of ``video_vae`` or ``audio_vae``."""
    _check_vae_config(folder, log)
    paths = sorted(folder.rglob("*.safetensors"))
    if not paths:
        log.add("shard_missing", folder, why="no safetensors file lies in it", fix=_FOLDER)
    files = tuple(file for path in paths if (file := read_header(path, log)) is not None)
    tensors = tuple(tensor for file in files for tensor in file.tensors)
    return ShardSet(files, tensors, complete=bool(paths) and len(files) == len(paths))


def _check_vae_config(folder: Path, log: FaultLog) -> None:
    path = folder / "config.json"
    config = read_json(path, log, code="config", fix=_RELEASE)
    if config is None:
        return
    channels = CHANNELS[folder.name]
    if config.get("latent_channels") != channels:
        value = config.get("latent_channels")
        why = f"H3's DiT works on {channels} channels here"
        log.add("config_value", path, f"latent_channels={value!r}", why=why, fix=_RELEASE)
    for name in ("latents_mean", "latents_std"):
        values = config.get(name)
        numbers = isinstance(values, list) and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        )
        if not numbers or len(values or ()) != channels:
            log.add("config_value", path, name, why=f"it must be a list of {channels} numbers", fix=_RELEASE)
    rate = config.get("sample_rate")
    if folder.name == "audio_vae" and (type(rate) is not int or rate < 1):
        log.add("config_value", path, f"sample_rate={rate!r}", why="it must be samples a second", fix=_RELEASE)
    auto_map = config.get("auto_map")
    reference = auto_map.get("AutoModel") if isinstance(auto_map, dict) else None
    if not isinstance(reference, str) or "." not in reference:
        why = "it must name the class that loads this VAE, as MODULE.CLASS"
        log.add("config_value", path, f"auto_map.AutoModel={reference!r}", why=why, fix=_RELEASE)
        return
    if "--" in reference:
        why = "it loads and runs code of another repository, and not the code that came with these weights"
        log.add("config_value", path, f"auto_map.AutoModel={reference!r}", why=why, fix=_RELEASE)
        return
    _check_code(folder / f"{reference.split('.', 1)[0]}.py", reference, log)


def _check_code(module: Path, reference: str, log: FaultLog) -> None:
    """The file with the VAE's class: there, whole, Python, and holding that class. It is parsed and not run."""
    if not module.is_file():
        why = f"config.json loads the VAE with {reference}, and this file is missing"
        log.add("code_missing", module, why=why, fix=_FOLDER)
        return
    try:
        raw = module.read_bytes()
    except OSError as exc:
        log.add("unreadable", module, why=exc.strerror or str(exc), fix=_READ_ACCESS)
        return
    if raw.startswith(LFS_PREFIX):
        log.add("lfs_pointer", module, why=LFS_WHY, fix=LFS_FIX)
        return
    try:
        names = {node.name for node in ast.walk(ast.parse(raw)) if isinstance(node, ast.ClassDef)}
    except (SyntaxError, ValueError, RecursionError) as exc:
        log.add("code_malformed", module, why=f"it is not Python ({exc})", fix=_RELEASE)
        return
    wanted = reference.rsplit(".", 1)[-1]
    if wanted not in names and wanted.encode() not in raw:
        log.add("code_malformed", module, why=f"it has no class {wanted}, which config.json names", fix=_RELEASE)


def check_tokenizer(folder: Path, log: FaultLog) -> None:
    """Files without which the host cannot build the tokenizer."""
    read_json(folder / "tokenizer_config.json", log, code="tokenizer", fix=_RELEASE)
    _check_vocabulary(folder, log)


def check_processor(folder: Path, log: FaultLog) -> None:
    """Files without which the host cannot build the image processor and its tokenizer."""
    # Older releases of transformers write one name, newer ones the other; both are read.
    names = ("preprocessor_config.json", "processor_config.json")
    path = next((folder / name for name in names if (folder / name).is_file()), folder / names[0])
    read_json(path, log, code="processor", fix=_RELEASE)
    _check_vocabulary(folder, log)


def _check_vocabulary(folder: Path, log: FaultLog) -> None:
    if (folder / "tokenizer.json").is_file() or not (folder / "vocab.json").is_file():
        read_json(folder / "tokenizer.json", log, code="tokenizer", fix=_RELEASE)
        return
    read_json(folder / "vocab.json", log, code="tokenizer", fix=_RELEASE)
    if not (folder / "merges.txt").is_file():
        why = "vocab.json is of no use without the merges"
        log.add("tokenizer_missing", folder / "merges.txt", why=why, fix=_RELEASE)
