"""Seconds of matrix products and elementwise kernels, from a cluster's rates."""

from __future__ import annotations

from ds_usp.planner.hardware import HBM_FRACTION, Cluster
from ds_usp.planner.profile_rows import interpolate_curve


def elementwise_s(cluster: Cluster, moved_bytes: float) -> float:
    """Elementwise kernels that read and write so much."""
    return moved_bytes / (HBM_FRACTION * cluster.hbm_bytes_per_s)


def gemm_s(cluster: Cluster, tokens: float, multiplications: float) -> float:
    """GEMMs over so many tokens: ``2 m n k / (F eta(m))``."""
    efficiency = interpolate_curve(cluster.gemm_efficiency, tokens)
    return 2 * multiplications / (cluster.peak_flop_per_s * efficiency)
