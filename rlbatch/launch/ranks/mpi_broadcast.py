"""MPI itself, if mpi4py is installed, for ranks that somebody's own mpirun started: rank 0 tells the others where it is."""

from __future__ import annotations

import os

from rlbatch.launch.ranks.rank_info import RankInfo

_MPIRUN = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")


def is_under_mpirun() -> bool:
    """Whether mpirun started this process."""
    return any(name in os.environ for name in _MPIRUN)


def broadcast(text: str, info: RankInfo) -> str | None:
    """Rank 0's text, on all ranks; a collective of MPI, which is begun and ended here: what comes later knows nothing of it.

    Args:
        text: On rank 0.
        info: This rank.

    Returns:
        None: there is no mpi4py, or it belongs to another MPI than this mpirun.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # the latter: it finds no library of MPI
        return None
    MPI.Init()
    try:
        world = MPI.COMM_WORLD
        if (world.Get_rank(), world.Get_size()) != (info.rank, info.world_size):
            return None
        told: str = world.bcast(text, root=0)
        return told
    finally:
        MPI.Finalize()
