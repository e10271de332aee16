# SPDX-License-Identifier: Apache-2.0
"""Named tensors -> resident weights: which precision each linear has, and the kernels that compute with it.

``recipe`` and ``plan`` decide (no torch); ``contract`` says what a backend is; ``fp8`` is the arithmetic that all FP8
backends share; ``cutlass_fp8`` is the fast backend and ``reference`` its oracle.
"""
