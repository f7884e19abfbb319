"""The built-in clusters: one row a number, with where it is from.

Peaks, memory and link speeds are the vendors' datasheets (dense bf16, one direction); what a
transfer reaches of a link and what kernels reach of the peak is measured where it says so and
assumed elsewhere. A profile of the user's own machine replaces the assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

GIB = 2.0**30
_H200 = "4 H200 of one host, NVLink, torch 2.11, NCCL 2.28.9, 2026-11-20"
_DATA = "NVIDIA's datasheet"
_NET = "what a transfer usually reaches of the link"

_Row = tuple[Any, str, str]


def _datasheet(value: Any, source: str = _DATA) -> _Row:
    return value, "datasheet", source


def _assumed(value: Any, source: str) -> _Row:
    return value, "assumed", source


def _measured(value: Any, source: str = _H200) -> _Row:
    return value, "measured", source


# (tokens, share of the peak): how matrix products of a few thousand features fill a GPU.
_GEMM = ((256, 0.30), (1024, 0.55), (4096, 0.68), (16384, 0.72))
_AMPERE_GEMM = ((256, 0.45), (1024, 0.62), (4096, 0.70), (16384, 0.72))
_AMPERE_ATTENTION = ((1024, 0.35), (4096, 0.50), (16384, 0.58), (65536, 0.60))
_HOPPER_ATTENTION = ((1024, 0.30), (4096, 0.47), (8192, 0.55), (32768, 0.556))

_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "gpus_per_node": _datasheet(8, "HGX boards"),
        "nics": _datasheet(8, "one NIC a GPU"),
        "network_latency_s": _assumed(30e-6, "NCCL between nodes"),
        "host_bytes_per_s": _assumed(20e9, "PCIe 4.0 x16, all GPUs at once, both directions"),
        "host_memory_bytes": _assumed(1024 * GIB, "usual hosts"),
        "contention": _assumed(0.12, "as measured on H200"),
        "workspace_bytes": _assumed(
            0.88e9, "fitted once to the Llama-65B runs of Megatron-Kwai (ATC 24, figure 7)"
        ),
        "gemm_efficiency": _assumed(_GEMM, "matrix products of transformer layers"),
    }
)


def _nvlink(port_bytes_per_s: float, nic_bytes_per_s: float, nics: int = 8) -> _Row:
    level = ("node", 8, port_bytes_per_s, nics * nic_bytes_per_s, 25e-6)
    return _assumed((level,), f"NVLink and {nics} NICs a node: {_NET}")


_TABLE: Mapping[str, Mapping[str, Any]] = {
    "a100": {
        "peak_flop_per_s": _datasheet(312e12),
        "memory_bytes": _datasheet(80 * GIB),
        "hbm_bytes_per_s": _datasheet(2.039e12),
        "levels": _nvlink(230e9, 22e9),
        "gemm_efficiency": _assumed(_AMPERE_GEMM, "cuBLAS on A100"),
        "attention_efficiency": _assumed(_AMPERE_ATTENTION, "FlashAttention-2 on A100"),
    },
    "a800": {
        "peak_flop_per_s": _datasheet(312e12),
        "memory_bytes": _datasheet(80 * GIB),
        "hbm_bytes_per_s": _datasheet(2.039e12),
        "levels": _nvlink(155e9, 22e9, 4),
        "nics": _assumed(4, "4 x 200 Gbps"),
        "gemm_efficiency": _assumed(_AMPERE_GEMM, "cuBLAS on A100"),
        "attention_efficiency": _assumed(_AMPERE_ATTENTION, "FlashAttention-2 on A100"),
    },
    "h800": {
        "peak_flop_per_s": _datasheet(989.5e12),
        "memory_bytes": _datasheet(80 * GIB),
        "hbm_bytes_per_s": _datasheet(3.35e12),
        "levels": _assumed(
            (("node", 8, 150e9, 8 * 12.5e9, 25e-6),),
            f"NVLink of 200 GB/s a direction: {_NET}; NICs of 100 Gbps as in Megatron-Kwai's runs",
        ),
        "attention_efficiency": _assumed(_HOPPER_ATTENTION, "as measured on H200"),
    },
    "h100": {
        "peak_flop_per_s": _datasheet(989.5e12),
        "memory_bytes": _datasheet(80 * GIB),
        "hbm_bytes_per_s": _datasheet(3.35e12),
        "levels": _nvlink(290e9, 44e9),
        "host_bytes_per_s": _assumed(40e9, "PCIe 5.0 x16, all GPUs at once, both directions"),
        "attention_efficiency": _assumed(_HOPPER_ATTENTION, "as measured on H200"),
    },
    "h200": {
        "peak_flop_per_s": _datasheet(989.5e12),
        "memory_bytes": _datasheet(141e9),
        "hbm_bytes_per_s": _datasheet(4.8e12),
        "levels": _measured((("node", 8, 290e9, 8 * 44e9, 90e-6),), f"{_H200}; NICs assumed"),
        "host_bytes_per_s": _assumed(40e9, "PCIe 5.0 x16, all GPUs at once, both directions"),
        "attention_efficiency": _measured(_HOPPER_ATTENTION, f"{_H200}; cuDNN, both directions"),
        "contention": _measured(0.12, f"{_H200}; 8 products of 8192^3 over a 256 MB exchange"),
    },
    "l20": {
        "peak_flop_per_s": _datasheet(119.5e12),
        "memory_bytes": _datasheet(48 * GIB),
        "hbm_bytes_per_s": _datasheet(864e9),
        "levels": _assumed(
            (
                ("switch", 2, 20e9, 10e9, 20e-6),
                ("socket", 4, 20e9, 10e9, 30e-6),
                ("node", 8, 20e9, 2 * 22e9, 40e-6),
            ),
            "PCIe 4.0 x16 (datasheet 32 GB/s), of which a transfer reaches 20; two GPUs a switch, "
            "four a socket; what leaves either goes through host memory, written and read: half",
        ),
        "nics": _assumed(2, "2 x 200 Gbps"),
        "gemm_efficiency": _assumed(_AMPERE_GEMM, "as on A100"),
        "attention_efficiency": _assumed(
            ((1024, 0.55), (4096, 0.75), (16384, 0.88)), "FlashAttention-2 on Ada"
        ),
    },
    "cpu": {
        "peak_flop_per_s": _assumed(2e11, "a few cores of fp32"),
        "memory_bytes": _assumed(16 * GIB, "one process's share of a host"),
        "hbm_bytes_per_s": _assumed(20e9, "one process's share of a host"),
        "levels": _assumed((("node", 8, 1e9, 1e9, 1e-4),), "gloo over the loop-back device"),
        "nics": _assumed(1, "Ethernet"),
        "attention_efficiency": _assumed(((1024, 0.3),), "torch's flash kernel for CPUs"),
        "gemm_efficiency": _assumed(((256, 0.5), (4096, 0.7)), "MKL"),
        "host_bytes_per_s": _assumed(10e9, "a copy"),
    },
}
CLUSTERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: MappingProxyType({**_COMMON, **rows}) for name, rows in _TABLE.items()}
)
