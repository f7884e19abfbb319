# A training script for DeepSpeed's ALST, in the shape of its tutorial. Run with the globals
# `settings` (what a user would write down here) and `losses` (a list).
import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # fmt: skip
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from deepspeed.runtime.utils import move_to_device
from deepspeed.utils import groups
from transformers import AutoModelForCausalLM

model_name_or_path = settings["path"]  # noqa: F821
sequence_parallel_size = settings["sp"]  # noqa: F821
config = {
    "train_micro_batch_size_per_gpu": settings["rows"],  # noqa: F821
    "zero_optimization": {"stage": settings["stage"]},  # noqa: F821
    "sequence_parallel_size": sequence_parallel_size,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}

dist.init_distributed(dist_backend="gloo", dist_init_required=False)

mpu = UlyssesSPAttentionHF.register_with_transformers(
    model_name_or_path=model_name_or_path,
    core_attn_implementation="sdpa",
    sequence_parallel_size=sequence_parallel_size,
    micro_batch_size=settings["rows"],  # noqa: F821
    seq_length_is_variable=True,
)

model = AutoModelForCausalLM.from_pretrained(model_name_or_path)
optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])  # noqa: F821
model, _, _, _ = deepspeed.initialize(config=config, model=model, optimizer=optimizer, mpu=mpu)

sp_group = groups._get_sequence_parallel_group()
sp_world_size = groups._get_sequence_parallel_world_size()
sp_rank = groups._get_sequence_parallel_rank()
loader = torch.utils.data.DataLoader(settings["data"], batch_size=None)  # noqa: F821
loader = UlyssesSPDataLoaderAdapter(
    loader, sp_rank=sp_rank, sp_group=sp_group, sp_world_size=sp_world_size, device=model.device
)

for batch in loader:
    batch = move_to_device(batch, model.device)
    outputs = model(**batch)
    shift_labels = batch["shift_labels"]
    loss = model.module.loss_function(
        logits=outputs.logits,
        labels=None,
        shift_labels=shift_labels,
        vocab_size=model.module.config.vocab_size,
    )

    losses_per_rank = torch.distributed.nn.functional.all_gather(loss, group=sp_group)
    good_tokens = (shift_labels != -100).view(-1).sum()
    good_tokens_per_rank = torch.distributed.nn.functional.all_gather(good_tokens, group=sp_group)
    total_loss = sum(
        losses_per_rank[rank] * good_tokens_per_rank[rank] for rank in range(sp_world_size)
    )
    loss = total_loss / max(sum(good_tokens_per_rank), 1)

    losses.append(loss.item())  # noqa: F821
    model.backward(loss)
    model.step()
