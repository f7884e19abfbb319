"""Seconds of a layer's tensor-parallel exchanges, and what its products hide of them."""

from __future__ import annotations

from ds_usp.planner.hardware import Cluster
from ds_usp.planner.hidden import HiddenExchange, exposed, under
from ds_usp.planner.kernel_time import gemm_s
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.topology import COLLECTIVE, exchange_s, group_of
from ds_usp.planner.traffic import layer_traffic


def tensor_parallel_time(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> tuple[HiddenExchange, HiddenExchange]:
    """Forward and backward of one layer and one micro batch.

    Each of the two pairs of linear layers all-reduces once a direction; in backward under the
    product of the first layer's weight gradient, as megatron-core and Megatron-DeepSpeed have it.

    With sharded tokens (Megatron's ``--sequence-parallel``) each pair all-gathers before and
    reduce-scatters after, forward and backward, and backward gathers once more. Four of these six
    of backward are posted under products, and count as exposed: layers on 2 H200 took 3 to 23 %
    longer than with all-reduces (``tp_overlap.csv``), by these formulas 7 to 17 % if all are
    exposed and 1 to 4 % if four are hidden; and published throughputs with sharded tokens are 6 %
    off in the mean, not 10 %.
    """
    if config.tp == 1:
        return HiddenExchange(), HiddenExchange()
    traffic, group = layer_traffic(work, config), group_of(config, "tp")
    if config.tp_sequence:
        forward = exchange_s(cluster, group, traffic.tp_forward, COLLECTIVE, 4)
        backward = exchange_s(cluster, group, traffic.tp_backward, COLLECTIVE, 6)
        return exposed(forward), exposed(backward)
    tokens, model = work.rank_tokens(config), work.model
    one = exchange_s(cluster, group, traffic.tp_forward / 2, COLLECTIVE, 2)
    hidden = HiddenExchange()
    for width in (model.q_width + 2 * model.kv_width, model.ffn * (2 if model.gated else 1)):
        product = gemm_s(cluster, tokens, tokens * model.hidden * width / config.tp)
        hidden += under(cluster, one, product)
    return exposed(2 * one), hidden
