"""Environment variables that a cluster gives to every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlbatch.config.schema import ClusterConfig

SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def cluster_variables(cluster: ClusterConfig) -> Mapping[str, str]:
    """``cluster.environment``, the variables that select ``cluster.interface``, and what every rank needs."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # A rank that is killed must not take its last lines with it.
        "PYTHONUNBUFFERED": "1",
        **(dict.fromkeys(SOCKET_VARIABLES, cluster.interface) if cluster.interface else {}),
        **cluster.environment,
    }
