# SPDX-License-Identifier: Apache-2.0
"""Pure functions from facts to checks. None of them asks the machine."""
