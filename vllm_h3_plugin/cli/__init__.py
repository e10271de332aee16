# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-h3`` command: one module a verb.

This module only knows the verbs' names and one-line summaries; a verb's module is imported when it is called, so
``vllm-h3 --help`` costs no torch, no vLLM and no PyAV.
"""

from __future__ import annotations

from vllm_h3_plugin.cli.main import main

__all__ = ["main"]
