# SPDX-License-Identifier: Apache-2.0
"""Measurements beside the stock host: a step, a load, a matrix multiplication. Nothing of it runs in a server."""
