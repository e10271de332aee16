# SPDX-License-Identifier: Apache-2.0
"""The page at ``/h3``: plain HTML, CSS and JavaScript modules, served as they lie here by ``host/page_routes.py``."""
