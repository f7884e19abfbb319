"""FSDP2, dp x (ulysses x ring):  torchrun --nproc-per-node 4 fsdp2.py --check"""

from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from check import matches_one_process, print_rank0
from model import BATCH, GPT, SyntheticDocuments, attention_of, flags, optimizer_of, run, start
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from ds_usp import training


def main(argv: list[str] | None = None) -> int:
    """Train a few steps; 1 if ``--check`` finds a difference."""
    args = flags(__doc__).parse_args(argv)
    device, dtype, mesh = start(args)
    dp = training.data_parallel_ranks(mesh)  # the ranks of a mesh share every sequence: one replica
    data = SyntheticDocuments(args.seq_len)
    full = DataLoader(data, BATCH, sampler=DistributedSampler(data, dp.size, dp.rank))
    # Shifts the labels of full sequences, then shards. Never let the model shift them: a Hugging
    # Face model called with labels= would, inside each shard, and be wrong at every border.
    loader = training.SequenceParallelDataLoader(full, mesh, args.layout, device=device)
    model = GPT().to(device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)  # over all ranks of all meshes
    optimizer = optimizer_of(model.parameters(), args.check)
    first, steps, world = 0, {}, dist.get_world_size()
    names = ("model_state_dict", "optim_state_dict")
    if args.load:
        state = dict(zip(names, get_state_dict(model, optimizer), strict=True), step=0)
        dcp.load(state, checkpoint_id=args.load)  # in place
        first = state.pop("step")
        set_state_dict(model, optimizer, **state)
    for step, batch in islice(enumerate(loader), first, args.steps):
        logits = model(batch.tokens, batch.positions, attention_of(batch, mesh)).float()
        summed = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        # FSDP divides the sum of all ranks' gradients by the number of ranks. The mean is over the
        # loss tokens of the global batch, of which every rank has another number.
        loss = summed * training.loss_token_weight(batch.loss_tokens, scale=world)
        loss.backward()
        total = training.mean_loss([loss], world, dist.group.WORLD)  # for the screen
        if args.check:
            steps[step] = total, {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        print_rank0(f"step {step}: loss {total:.4f}")
    if args.save:  # each rank writes its shards; any number of ranks can load them
        state = dict(zip(names, get_state_dict(model, optimizer), strict=True), step=args.steps)
        dcp.save(state, checkpoint_id=args.save)
    return int(args.check and not matches_one_process(steps, full, dp.size, device))


if __name__ == "__main__":
    raise SystemExit(run(main))
