"""Numbers of schedulers in the Ray cluster's own key-value store."""

from __future__ import annotations

import asyncio
import os

from ray.experimental.internal_kv import _internal_kv_list, _internal_kv_put
from ray.util import get_node_ip_address

_NAMESPACE = b"spool"


class ClusterEpochs:
    """A register for `EpochAuthority`, one for cells of this number in all applications of the cluster.

    It lives as long as the GCS's state. One key of some bytes stays for each start of a scheduler.
    """

    def __init__(self, cell: int) -> None:
        self._prefix = b"cell-%d/scheduler/" % cell

    async def taken(self) -> list[int]:
        keys = await asyncio.to_thread(_internal_kv_list, self._prefix, namespace=_NAMESPACE)
        return [int(key.removeprefix(self._prefix)) for key in keys]

    async def take(self, number: int) -> bool:
        key, owner = self._prefix + b"%d" % number, f"process {os.getpid()} on {get_node_ip_address()}"
        existed = await asyncio.to_thread(_internal_kv_put, key, owner, overwrite=False, namespace=_NAMESPACE)
        return not existed
