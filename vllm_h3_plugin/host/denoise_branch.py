# SPDX-License-Identifier: Apache-2.0
"""A request's packed layout, which tells each step's timesteps without asking the device.

The host's branch fills a timestep for every row on the device and lets ``torch.unique`` find the few that differ, which
makes the processor wait for the device in each step, and leaves their values there. They are known before: a row
belongs to one of five groups, and a group's timestep is a number of this step.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.models.minimax_h3 import denoise_loop as host_loop

HostBranch = host_loop.MiniMaxH3DenoiseBranch

REST, VIDEO_TARGET, VIDEO_CONDITION, AUDIO_TARGET, AUDIO_CONDITION = range(5)


class MiniMaxH3DenoiseBranch(HostBranch):  # type: ignore[valid-type,misc]  # the host's types are not followed
    """See the module's docstring. Tensors are equal to the host's."""

    _groups: torch.Tensor | None = None
    _present: tuple[int, ...] = ()

    def forward_kwargs(
        self,
        *,
        video_rows: torch.Tensor,
        audio_rows: torch.Tensor,
        t_video: float,
        t_audio: float,
        imgvid_cond_timestep: float,
        audio_ref_cond_timestep: float,
        **targets: torch.Tensor | None,
    ) -> dict[str, Any]:
        """The host's, with ``unique_timesteps`` carrying its values as ``h3_values`` for :func:`known_timesteps`."""
        if any(target is not None for target in targets.values()):
            # Rows with timesteps of their own (latent-mask edits): only the device knows which differ.
            result: dict[str, Any] = super().forward_kwargs(
                video_rows=video_rows,
                audio_rows=audio_rows,
                t_video=t_video,
                t_audio=t_audio,
                imgvid_cond_timestep=imgvid_cond_timestep,
                audio_ref_cond_timestep=audio_ref_cond_timestep,
                **targets,
            )
            return result
        if self._groups is None:
            self._groups = self._row_groups()
            self._present = tuple(self._groups.unique().tolist())
        locked = getattr(self, "locked_audio_rows", None) is not None
        timesteps = {
            REST: t_video,
            VIDEO_TARGET: t_video,
            VIDEO_CONDITION: imgvid_cond_timestep,
            AUDIO_TARGET: 1.0 if locked else t_audio,
            AUDIO_CONDITION: audio_ref_cond_timestep,
        }
        unique, inverse = distinct([timesteps[group] if group in self._present else None for group in timesteps])
        values = _to_device(torch.tensor(unique, dtype=torch.float32, device="cpu"), self.device)
        values.h3_values = tuple(unique)  # type: ignore[attr-defined]
        x = self.x_base.clone()
        x[0].index_copy_(0, self.img_pos_dev, video_rows)
        audio_x = self.audio_x_base.clone()
        audio_x[0].index_copy_(0, self.audio_pos_dev, audio_rows)
        return {
            **self.static_kwargs,
            "x": x,
            "audio_x": audio_x,
            "unique_timesteps": values,
            "inverse_indices": _to_device(torch.tensor(inverse, device="cpu"), self.device).index_select(
                0, self._groups
            ),
        }

    def _row_groups(self) -> torch.Tensor:
        groups = torch.full((self.seq_len,), REST, dtype=torch.long)
        for positions, targets, target, condition in (
            (self.img_pos, self.update_mask, VIDEO_TARGET, VIDEO_CONDITION),
            (self.audio_pos, self.audio_update_mask, AUDIO_TARGET, AUDIO_CONDITION),
        ):
            positions, targets = positions.cpu(), targets.cpu()
            groups[positions[targets]] = target
            groups[positions[~targets]] = condition
        return groups.to(self.device)


def distinct(timesteps: list[float | None]) -> tuple[list[float], list[int]]:
    """Distinct values in rising order as FP32 knows them, and each entry's place among them (0 for None)."""
    rounded = [
        None if value is None else float(torch.tensor(value, dtype=torch.float32, device="cpu")) for value in timesteps
    ]
    unique = sorted({value for value in rounded if value is not None})
    return unique, [0 if value is None else unique.index(value) for value in rounded]


def known_timesteps(unique_timesteps: torch.Tensor) -> tuple[float, ...] | None:
    """The values of a step's distinct timesteps, where this module made them."""
    values: tuple[float, ...] | None = getattr(unique_timesteps, "h3_values", None)
    return values


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # From pinned memory and without waiting: a copy from pageable memory waits for the stream.
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
