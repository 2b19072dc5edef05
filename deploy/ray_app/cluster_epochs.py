"""Numbers of schedulers in the Ray cluster's own key-value store."""

from __future__ import annotations

import asyncio
import os

from ray.experimental.internal_kv import _internal_kv_list, _internal_kv_put
from ray.util import get_node_ip_address

_NAMESPACE = b"spool"
_PREFIX = b"scheduler/"


class ClusterEpochs:
    """A register for `EpochAuthority`, shared by all applications of the cluster; it lives as long as the GCS's state.

    One key of some bytes stays for each start of a scheduler.
    """

    async def taken(self) -> list[int]:
        keys = await asyncio.to_thread(_internal_kv_list, _PREFIX, namespace=_NAMESPACE)
        return [int(key.removeprefix(_PREFIX)) for key in keys]

    async def take(self, number: int) -> bool:
        key, owner = _PREFIX + b"%d" % number, f"process {os.getpid()} on {get_node_ip_address()}"
        existed = await asyncio.to_thread(_internal_kv_put, key, owner, overwrite=False, namespace=_NAMESPACE)
        return not existed
