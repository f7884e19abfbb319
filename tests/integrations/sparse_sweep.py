"""Every family whose indexer picks the keys, on the ranks of torchrun: a row for each batch.

    PYTHONPATH=.:tests torchrun --nproc-per-node 3 tests/integrations/sparse_sweep.py FILE.csv

A row has the runs of a batch (checkpoints of both kinds, queries in chunks, on a ring and, of an
even number of ranks, with a Ulysses degree of 2), how many of them were refused, and the largest
error of the others, of loss, logits and every gradient. Beside it stands the largest error against
one process in fp32 alone (`judged`).
"""

import copy
import csv
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from cases import mesh_of
from model_runs import BOUND, judged, on_the_mesh, reference, take_gradients
from test_sparse_layers import BATCHES, sparse_model

from ds_usp import SequenceMesh, UnsupportedAttentionError
from ds_usp.integrations.transformers import enable

TYPES = ("axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm5_next", "glm_moe_dsa")
TYPES += ("hy_v4", "minimax_m3_vl_text", "mistral_large4", "qwen4_exp", "qwen4_exp_text")
IN_CHUNKS: dict[str, Any] = {"recompute": "full", "query_chunks": 2}


def runs_of(ranks: int) -> list[tuple[SequenceMesh, bool | None, dict[str, Any]]]:
    """Return mesh, kind of checkpoints (reentrant or not; None: none) and options of each run of a
    batch."""
    ring = mesh_of(1)
    runs = [(ring, None, {}), (ring, False, {}), (ring, True, {}), (ring, None, IN_CHUNKS)]
    return [*runs, (mesh_of(2), None, {})] if ranks % 2 == 0 else runs


def errors_of(model: Any, alone: Any, name: str) -> list[tuple[float, float] | None]:
    """Return the errors of each run, judged and against fp32; None where it is refused."""
    found: list[tuple[float, float] | None] = []
    want = reference(alone, BATCHES[name]())
    for mesh, reentrant, options in runs_of(dist.get_world_size()):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        try:
            with enable(model, mesh, logits="whole", **options):
                have = on_the_mesh(model, mesh, BATCHES[name]())
            found.append((judged(have, want, alone, BATCHES[name]()), have.error(want)))
        except UnsupportedAttentionError:
            take_gradients(model)
            found.append(None)
        if reentrant is not None:
            model.disable_input_require_grads()
            model.gradient_checkpointing_disable()
    return found


def main() -> int:
    """Write the rows; 1 if a run is neither within the bound nor refused."""
    dist.init_process_group("gloo")
    ranks, worst = dist.get_world_size(), 0.0
    for model_type in TYPES:
        model = sparse_model(model_type)
        alone = copy.deepcopy(model)
        for name in BATCHES:
            if name in ("left", "short"):  # some types refuse the positions of the first
                continue
            found = errors_of(model, alone, name)
            errors = [x for x in found if x is not None]
            judgement, in_fp32 = (max(x) for x in zip(*errors, strict=True))
            worst = max(worst, judgement)
            row = [model_type, ranks, name, len(found), len(found) - len(errors)]
            row += [f"{judgement:.1e}", f"{in_fp32:.1e}"]
            if dist.get_rank() == 0:
                with Path(sys.argv[1]).open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow(row)
    dist.destroy_process_group()
    return int(not worst <= BOUND)


if __name__ == "__main__":
    sys.exit(main())
