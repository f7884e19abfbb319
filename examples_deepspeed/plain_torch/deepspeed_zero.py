"""DeepSpeed ZeRO, dp x (ulysses x ring):  torchrun --nproc-per-node 4 deepspeed_zero.py --check"""

from itertools import islice

import torch
import torch.nn.functional as F
from check import matches_one_process, print_rank0
from deepspeed.utils import safe_get_full_grad
from model import BATCH, GPT, SyntheticDocuments, attention_of, flags, optimizer_of, run, start
from torch.utils.data import DataLoader, DistributedSampler

from ds_usp import training


def main(argv: list[str] | None = None) -> int:
    """Train a few steps; 1 if ``--check`` finds a difference."""
    parser = flags(__doc__)
    parser.add_argument("--zero-stage", type=int, default=1, choices=range(4))
    args = parser.parse_args(argv)
    training.prepare_deepspeed()
    device, dtype, mesh = start(args)
    dp = training.data_parallel_ranks(mesh)  # the ranks of a mesh share every sequence
    data = SyntheticDocuments(args.seq_len)
    full = DataLoader(data, BATCH, sampler=DistributedSampler(data, dp.size, dp.rank))
    # Shifts the labels of full sequences, then shards. Never let the model shift them: a Hugging
    # Face model called with labels= would, inside each shard, and be wrong at every border.
    loader = training.SequenceParallelDataLoader(full, mesh, args.layout, device=device)
    model = GPT()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": args.zero_stage},
        "zero_allow_untested_optimizer": args.check,
    }
    # Not mesh_param= or sequence_parallel_size: ZeRO-0 to 2 would not sum over the sequence then.
    groups = training.ParallelGroups.from_mesh(mesh)
    optimizer = optimizer_of(model.parameters(), args.check)
    engine, rule = training.initialize_deepspeed(model, optimizer, config, groups)
    first, steps, scale = 0, {}, rule.loss_scale(micro_batches=1)
    if args.load:
        first = engine.load_checkpoint(args.load)[1]["step"]
    for step, batch in islice(enumerate(loader), first, args.steps):
        logits = engine(batch.tokens, batch.positions, attention_of(batch, mesh)).float()
        summed = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        # The mean over the loss tokens of the global batch, times what DeepSpeed will divide by.
        loss = summed * training.loss_token_weight(batch.loss_tokens, scale)
        engine.backward(loss)
        total = training.mean_loss([loss], scale, groups.sp_dp)  # for the screen
        if args.check:
            steps[step] = total, {n: safe_get_full_grad(p) for n, p in model.named_parameters()}
        engine.step()
        print_rank0(f"step {step}: loss {total:.4f}")
    if args.save:
        engine.save_checkpoint(args.save, client_state={"step": args.steps})
    return int(args.check and not matches_one_process(steps, full, dp.size, device))


if __name__ == "__main__":
    raise SystemExit(run(main))
