# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel runs, why, and without masks."""
