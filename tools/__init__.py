# SPDX-License-Identifier: Apache-2.0
"""Developer tools behind the Makefile's targets; run them as ``python -m tools.NAME`` from the top of the checkout."""
