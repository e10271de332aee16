# SPDX-License-Identifier: Apache-2.0
"""The CPU reference platform: the real server, API and loader, with the arithmetic in plain torch."""
