# SPDX-License-Identifier: Apache-2.0
"""Is this machine fit to build, start and run H3? Asked before anything is built or started, and changing nothing.

``probe`` asks the machine, ``checks`` judge the answers, ``run`` puts them in order. Imports neither torch nor the
host.
"""
