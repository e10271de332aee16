# SPDX-License-Identifier: Apache-2.0
"""Developer tools behind the Makefile's targets; run them as ``python -m tools.NAME`` from the top of the checkout."""

import platform
import sys

# Before any other import, since an older Python fails on the next one without saying why.
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(
        f"error: {sys.executable} is Python {platform.python_version()}\n"
        "  why: the hosts are locked for Python 3.11 and 3.12\n"
        "  fix: Install one of them and run make with PYTHON=python3.12 (or its path)."
    )
