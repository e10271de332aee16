# SPDX-License-Identifier: Apache-2.0
"""Are several machines fit to be one server? Each node is asked by a task of its own, through Ray.

``node`` and ``link`` run on the nodes, ``by_ray`` reaches them, ``judge`` compares the answers, ``run`` puts it in
order. Ray is imported only when a cluster is asked for.
"""
