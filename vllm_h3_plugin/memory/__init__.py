# SPDX-License-Identifier: Apache-2.0
"""What a model and a request need in memory, predicted from shapes alone, and what therefore fits. Imports no torch."""
