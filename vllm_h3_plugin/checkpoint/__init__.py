# SPDX-License-Identifier: Apache-2.0
"""Files on disk -> named tensors: what a checkpoint must hold, whether it does, and how its bytes are read."""
