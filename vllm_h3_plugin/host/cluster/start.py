# SPDX-License-Identifier: Apache-2.0
"""From a Ray cluster to ranks with a model, at first and after a loss."""

from __future__ import annotations

import threading
import time
from typing import Any

from vllm.logger import init_logger

from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.host.cluster import nodes
from vllm_h3_plugin.host.cluster.group import Group
from vllm_h3_plugin.host.cluster.rank import Asked
from vllm_h3_plugin.settings import Settings

logger = init_logger(__name__)


class Start:
    """Starts ranks, one a machine.

    Args:
        asked: what they serve.
        od_config: the host's config.
        resource: Ray's name of the devices.
        spares: keep a process beside each rank that has imported the host and waits: it takes over without the import.
    """

    def __init__(self, asked: Asked, od_config: Any, resource: str, values: Settings, *, spares: bool) -> None:
        self._asked = asked
        self._od_config = od_config
        self._resource = resource
        self._seconds = values.cluster_start_s
        self._address = values.cluster_address
        self._wants_spares = spares
        self._placement: Any = None
        self._nodes: list[str] = []
        self._spares: Group | None = None
        self._ended = False

    def first(self) -> Group:
        """The ranks of the server's start, loaded.

        Raises:
            H3Error: of the class that fits. Nothing that was started is left.
        """
        self._ray = nodes.connect(self._address, self._seconds)
        return self._ranks()

    def _ranks(self) -> Group:
        count = int(self._od_config.num_gpus or 1)
        self._nodes = nodes.wait_for_nodes(self._ray, count, self._resource, self._seconds)
        logger.info("event=cluster_nodes nodes=%s", self._nodes)
        self._placement = nodes.reserve(self._ray, self._nodes, self._resource, self._seconds)
        group = Group(self._ray, self._placement, self._nodes, {self._resource: 1})
        try:
            self._prepare(group)
            return self._load(group)
        except BaseException:
            group.end()
            self._forget_placement()
            raise

    def _prepare(self, group: Group) -> None:
        group.meet(self._seconds)
        group.check(self._asked, self._seconds)
        group.import_host(self._seconds)

    def _load(self, group: Group) -> Group:
        begun = time.monotonic()
        group.start(self._od_config, self._seconds)
        logger.info("event=cluster_loaded seconds=%.1f", time.monotonic() - begun)
        if self._wants_spares:
            threading.Thread(target=self._make_spares, args=(group,), daemon=True, name="h3-cluster-spares").start()
        return group

    def _make_spares(self, ranks: Group) -> None:
        spares = Group(self._ray, self._placement, self._nodes, {}, devices=ranks.devices)
        try:
            self._prepare(spares)
        except (H3Error, RuntimeError, TimeoutError) as exc:
            # Without them a start takes the import longer.
            logger.warning("event=no_spares why=%r", str(exc))
            spares.end()
            return
        if self._ended:
            spares.end()
            return
        self._spares = spares
        logger.info("event=spares_ready")

    def again(self) -> Group:
        """New ranks for those that were ended: those that wait, if all are there, else as at first.

        Raises:
            H3Error: as :meth:`first`, once the machines have had ``H3_CLUSTER_START_S`` to come back.
        """
        spares, self._spares = self._spares, None
        if spares is not None and not spares.lost(0):
            return self._load(spares)
        if spares is not None:
            spares.end()
        self._forget_placement()
        return self._ranks()

    def end(self, group: Group | None) -> None:
        """End everything."""
        self._ended = True
        for one in (group, self._spares):
            if one is not None:
                one.end()
        self._forget_placement()

    def _forget_placement(self) -> None:
        if self._placement is not None:
            self._ray.util.remove_placement_group(self._placement)
            self._placement = None
