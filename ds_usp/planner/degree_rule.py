"""The rule by which a sequence's GPUs are divided into Ulysses and ring.

README, the page about degrees and the planner's reasons say it in these words.
"""

from __future__ import annotations

from ds_usp.geometry.degrees import divisors

RULE = (
    "a sequence gets the fewest GPUs that hold it, the others are data parallel",
    "Ulysses takes the most of its GPUs that divide the KV heads and share a node",
    "the ring takes the rest",
)


def rule_degrees(ranks: int, kv_heads: int, gpus_per_node: int, tp: int = 1) -> tuple[int, int]:
    """Ulysses and ring degree of a sequence on so many ranks, by :data:`RULE`.

    Args:
        ranks: that share a sequence, tensor-parallel ones aside.
        tp: tensor-parallel ranks, among which the KV heads are divided and which share the node.
    """
    # On 2 and 4 GPUs over NVLink meshes differ by 1 to 5 %, so the links between nodes decide, and
    # an all-to-all waits for the slowest link where a ring's exchanges run under kernels. More
    # Ulysses ranks than KV heads send each head to several ranks.
    heads = max(1, kv_heads // tp)
    fitting = [
        degree
        for degree in divisors(ranks)
        if heads % degree == 0
        and (tp * ranks <= gpus_per_node or gpus_per_node % (tp * degree) == 0)
    ]
    return max(fitting), ranks // max(fitting)
