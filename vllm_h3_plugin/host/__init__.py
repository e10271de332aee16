# SPDX-License-Identifier: Apache-2.0
"""The glue to the host: the only folder that imports vllm or vllm_omni.

Facts about the host are cited as ``file:line`` of vLLM-Omni 0.30.0 unless another version is named; the contract tests
run against both pinned hosts.
"""
