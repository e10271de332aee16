# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of the real layout: for machines, tests and benchmarks that have no use for 134 GB.

Needs NumPy alone; no torch.
"""

from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec, tiny_dit, tiny_text, true_width_text
from vllm_h3_plugin.checkpoint.synthetic.vit_vae import VitVae, tiny_vit
from vllm_h3_plugin.checkpoint.synthetic.writer import SynthResult, planned_bytes, write_checkpoint

__all__ = [
    "SynthResult",
    "SynthSpec",
    "VitVae",
    "planned_bytes",
    "tiny_dit",
    "tiny_text",
    "tiny_vit",
    "true_width_text",
    "write_checkpoint",
]
