# SPDX-License-Identifier: Apache-2.0
"""The server seen from outside: how it is started, watched and asked. Imports no torch and no vLLM."""
