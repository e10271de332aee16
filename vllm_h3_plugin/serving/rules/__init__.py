# SPDX-License-Identifier: Apache-2.0
"""What a client may ask for, and what will really be made: decided before anything is queued. Imports no torch.

::

    names and values --read--> VideoAsk --check--> Accepted | [Fault, ...]

``read`` (:mod:`.read`) takes the fields of a form or a JSON body and knows every name; ``check`` (:mod:`.check`) holds
them against H3 and this server's :class:`~.limits.Limits`. Both go on after a fault, so that one answer lists all of
them. ``serving/accept.py`` runs both with the references between them.
"""
