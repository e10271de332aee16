# SPDX-License-Identifier: Apache-2.0
"""Finished clips: what they must be, what they are, and how they get their final name.

A leaf: nothing here imports vLLM, torch or another part of the project except ``errors`` and ``settings``.
PyAV, ffmpeg and Pillow are imported by the modules that use them, not by this package.
"""
