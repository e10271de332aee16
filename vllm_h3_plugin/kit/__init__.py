# SPDX-License-Identifier: Apache-2.0
"""A server in a container, from outside: bring it up, look at it, read its log, take it down.

Every outside fact and act goes through :class:`~vllm_h3_plugin.kit.outside.Outside`, so that a test can make up a
machine in any state. Nothing here imports torch, vLLM or a client library of a container engine: the engine is asked
through its own command line, which is what a person would type.
"""
