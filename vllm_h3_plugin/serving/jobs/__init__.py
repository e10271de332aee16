# SPDX-License-Identifier: Apache-2.0
"""Jobs of the video API: their records, their files, their line, and the one runner that works it off."""
