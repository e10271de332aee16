# SPDX-License-Identifier: Apache-2.0
"""Names of ``extra_params`` that have no field: what the host's model reads itself, held to the types that it takes.

Sources: vLLM-Omni 0.30.0 ``diffusion/models/minimax_h3/pipeline_minimax_h3.py`` (``_resolve_pad_seq_len``,
``MINIMAX_H3_MAX_PAD_SEQ_LEN``), ``quality_policy.py`` (``_resolve_force_refresh``) and
``diffusion/utils/media_utils.py`` (``normalize_preencode_batch_frames``).
"""

from __future__ import annotations

from typing import Any

from vllm_h3_plugin.serving.rules.findings import Findings
from vllm_h3_plugin.serving.rules.limits import Limits

_WORDS = {"audio_mode": ("native", "lock_source"), "force_refresh_step_policy": ("once", "repeat")}
_RANGES = {"force_refresh_step_hint": (1, 200), "preencode_batch_frames": (1, 1024), "pad_seq_len": (64, 1 << 20)}
_PAD_ALIGN = 64


def check_extra(found: Findings, limits: Limits) -> dict[str, Any]:
    """What goes to the host's model by name; faults for what it would refuse."""
    asked = found.ask.extra_params
    for name, value in asked.items():
        field = f"extra_params.{name}"
        if name not in limits.extra:
            found.fault(field, value, "this server's host has no such field", ", ".join(sorted(limits.extra)) or "none")
        elif name in _WORDS:
            if value not in _WORDS[name]:
                found.fault(field, value, "it is none of the known words", ", ".join(_WORDS[name]))
        elif name in _RANGES:
            if isinstance(value, bool) or not isinstance(value, int):
                low, high = _RANGES[name]
                found.fault(field, value, "it is not a whole number", f"{low} to {high}")
            elif found.within(field, value, *_RANGES[name]) and name == "pad_seq_len" and value % _PAD_ALIGN:
                near = -(-value // _PAD_ALIGN) * _PAD_ALIGN
                found.fault(field, value, f"it is no multiple of {_PAD_ALIGN}", f"multiples of {_PAD_ALIGN}", near)
        elif not isinstance(value, bool):
            found.fault(field, value, "it is not true or false", "true or false")
    if "force_refresh_step_policy" in asked and "force_refresh_step_hint" not in asked:
        policy = asked["force_refresh_step_policy"]
        found.fault("extra_params.force_refresh_step_policy", policy, "it needs force_refresh_step_hint beside it")
    return {name: value for name, value in asked.items() if name in limits.extra}
