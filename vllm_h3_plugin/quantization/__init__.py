# SPDX-License-Identifier: Apache-2.0
"""Named tensors -> resident weights: which precision each linear has, and the kernels that compute with it.

``recipe`` and ``plan`` decide (no torch); ``contract`` says what a backend is; ``fp8`` and ``int8`` are the arithmetic
that backends share; ``cutlass_fp8`` (CUDA) and ``npu_int8`` (Ascend) are the fast backends and ``reference`` their
oracle.
"""
