# SPDX-License-Identifier: Apache-2.0
"""Every name of a field that a request may carry, and what becomes of it."""

from __future__ import annotations

from vllm_h3_plugin.serving.rules.accepted import Kind

ALIASES = {
    "steps": "num_inference_steps",
    "num_outputs_per_prompt": "n",
    "duration": "seconds",
    "duration_seconds": "seconds",
    "frame_index": "frame_indices",
    "input_reference": "input_references",
}
"""Other names of the same field: the host's, and those its model takes from ``extra_params``."""

NESTED = ("video_params", "target", "extra_params")
"""Objects whose entries count as fields of their own."""

REFERENCES: dict[str, Kind | None] = {
    "input_references": None,
    "image_reference": "image",
    "video_reference": "video",
    "audio_reference": "audio",
}
"""Fields that carry references, and of what kind; None: whatever the bytes are."""

OBJECTS = frozenset({*NESTED, "lora", "frame_indices", *REFERENCES, "input_reference"})
"""Fields whose text in a form may be JSON."""

_NO_NEGATIVE = "H3 is distilled to run without a negative branch"
UNUSED = {
    "negative_prompt": _NO_NEGATIVE,
    "guidance_scale": _NO_NEGATIVE,
    "guidance_scale_2": _NO_NEGATIVE,
    "true_cfg_scale": _NO_NEGATIVE,
    "boundary_ratio": "H3 has one denoiser for all noise levels",
    "generate_sound": "every clip of H3 has sound",
    "sound_duration": "H3's sound is as long as its picture",
    "frame_interpolation_exp": "frames are not interpolated",
    "frame_interpolation_scale": "frames are not interpolated",
    "frame_interpolation_model_path": "frames are not interpolated",
}
"""Fields of the host's API that H3 makes nothing of. They are told back as without effect; ``strict`` refuses them."""

WITHOUT_EFFECT: dict[str, object] = {
    "negative_prompt": "",
    "generate_sound": True,
    "enable_frame_interpolation": False,
    "guidance_scale": 1.0,
    "true_cfg_scale": 1.0,
}
"""Values that ask for what H3 does anyway: nothing to tell."""

NOT_OFFERED = {
    "enable_frame_interpolation": "clips have the frames that H3 makes; interpolate them afterwards",
    "source_video": "editing a part of a clip is not offered",
    "source_audio": "editing a part of a clip is not offered",
    "video_noise_mask": "editing a part of a clip is not offered",
    "audio_noise_mask": "editing a part of a clip is not offered",
    "control_reference": "H3 has no control inputs",
    "control_type": "H3 has no control inputs",
    "long_video": "clips longer than 15 s are not offered",
    "long_video_mode": "clips longer than 15 s are not offered",
    "continuation_window_frames": "clips longer than 15 s are not offered",
    "continuation_overlap_frames": "clips longer than 15 s are not offered",
    "video_codec_options": "the server chooses how clips are encoded",
    "file_id": "this server keeps no uploaded files; send the file itself or a data: URI",
}
"""Fields of the host or of OpenAI that would change the clip, and that this server does not honour."""
