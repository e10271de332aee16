# SPDX-License-Identifier: Apache-2.0
"""AdaLN as a table of timesteps: what a schedule needs, how it is built, where it is kept."""
