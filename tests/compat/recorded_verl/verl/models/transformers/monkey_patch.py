"""What verl puts into transformers; it asks the heads to divide the ranks."""

import torch.distributed as dist
from transformers.integrations import flash_attention
from verl.utils.ulysses import get_ulysses_sequence_parallel_group


def _ulysses_flash_attention_forward(
    query_states,
    key_states,
    value_states,
    attention_mask,
    query_length,
    *args,
    position_ids=None,
    **kwargs,
):
    size = dist.get_world_size(get_ulysses_sequence_parallel_group())
    raise RuntimeError(f"verl's own attention over {size} ranks")


def apply_monkey_patch(
    model,
    ulysses_sp_size=1,
    use_remove_padding=True,
    use_fused_kernels=False,
    fused_kernels_backend=None,
    use_prefix_grouper=False,
    use_tiled_mlp=False,
    tiled_mlp_shards=4,
):
    assert model.config.num_attention_heads % ulysses_sp_size == 0
    flash_attention._flash_attention_forward = _ulysses_flash_attention_forward
