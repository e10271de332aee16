# SPDX-License-Identifier: Apache-2.0
"""Several machines as one server: the host's workers as Ray actors, torch.distributed between them.

``executor`` is what the host is given by name; ``nodes`` finds the machines; ``rank`` is the actor; ``group`` is all
actors of one start; ``facts`` and ``same`` see that the machines run and serve the same; ``network`` names addresses.
Ray is imported inside functions: whoever serves from one machine does not need it.
"""
