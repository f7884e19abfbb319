"""Train a diffusion transformer (Flux, Wan) by flow matching under DeepSpeed, over all ranks.

    torchrun --nproc-per-node 4 train_flow_matching.py --tiny wan --device cpu --check
    torchrun --nproc-per-node 8 train_flow_matching.py --model black-forest-labs/FLUX.1-dev \\
        --latents folder --deepspeed '{"zero_optimization": {"stage": 3}}'

``--latents`` is a folder of safetensors, one sample a file: ``latents`` of the VAE [channels,
height, width] or [channels, frames, height, width], ``text`` [tokens, dim] of the text encoder and,
for Flux, ``pooled`` [dim]. Samples of a micro batch have the same shape.
"""

import json
from pathlib import Path

import deepspeed
import diffusers
import torch
import torch.distributed as dist
from common import flags, mesh_of, print0, run, same_losses, start, tiny_transformer
from diffusers import FluxPipeline
from samples import sample_of
from torch.nn.functional import mse_loss

from ds_usp.integrations.diffusers import enable
from ds_usp.training import prepare_deepspeed

OPTIMIZERS = ("adamw", "sgd")  # SGD shows a wrong scale of gradients, which Adam hides


def transformer_of(args):
    """The transformer, and the optimizer of what is trained: all of it, or LoRA's matrices."""
    if args.tiny:
        transformer = tiny_transformer(args.tiny)
    else:
        options = {"subfolder": "transformer", "dtype": args.dtype}
        transformer = diffusers.AutoModel.from_pretrained(args.model, **options)
    if args.lora:
        from peft import LoraConfig

        torch.manual_seed(args.seed)  # the same matrices on every rank
        transformer.requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        transformer.add_adapter(LoraConfig(r=args.lora, target_modules=targets))
    if args.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    trained = [p for p in transformer.parameters() if p.requires_grad]
    kind = torch.optim.SGD if args.optimizer == "sgd" else torch.optim.AdamW
    return transformer.train(), kind(trained, lr=args.lr)


def loss_of(args, model, config, device, first):
    """The loss of a micro batch, the samples from ``first`` on; its noise too is of that number,
    so that the ranks of a mesh draw the same."""
    samples = [sample_of(args, config, first + i) for i in range(args.batch_size)]
    batch = {name: torch.stack([s[name] for s in samples]).to(device) for name in samples[0]}
    latents, dtype = batch["latents"].float(), args.dtype
    draw = torch.Generator().manual_seed(args.seed + first)
    sigma = torch.randn(args.batch_size, generator=draw).sigmoid().to(device)
    noise = torch.randn(latents.shape, generator=draw).to(device)
    given = {"timestep": sigma * 1000, "encoder_hidden_states": batch["text"].to(dtype)}
    if "pooled" in batch:  # Flux: [b, tokens, 4 * channels], a token for 2 x 2 latents
        count, _, height, width = latents.shape
        latents, noise = (FluxPipeline._pack_latents(x, *x.shape) for x in (latents, noise))
        grid = count, height // 2, width // 2, device, dtype
        given |= {"timestep": sigma.to(dtype), "pooled_projections": batch["pooled"].to(dtype)}
        given["img_ids"] = FluxPipeline._prepare_latent_image_ids(*grid)
        given["txt_ids"] = torch.zeros(batch["text"].shape[1], 3, device=device, dtype=dtype)
        given |= {"guidance": torch.ones_like(sigma)} if config.guidance_embeds else {}
    weight = sigma.view(-1, *[1] * (latents.ndim - 1))
    noisy = (latents + weight * (noise - latents)).to(dtype)
    velocity = model(noisy, **given, return_dict=False)[0]
    return mse_loss(velocity.float(), noise - latents)


def one_rank(args, config, device, replicas):
    """The losses of the same steps on this rank alone, without ds_usp and DeepSpeed."""
    transformer, optimizer = transformer_of(args)
    transformer.to(device)
    losses = []
    for step in range(args.steps):
        firsts = [(step * replicas + replica) * args.batch_size for replica in range(replicas)]
        parts = [loss_of(args, transformer, config, device, first) for first in firsts]
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save(folder, engine, transformer, lora):
    """Rank 0 writes the transformer, or LoRA's matrices, as diffusers reads them."""
    sharded = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(transformer.parameters()), enabled=sharded):
        if dist.get_rank() == 0:
            (transformer.save_lora_adapter if lora else transformer.save_pretrained)(folder)


def main(argv=None):
    """Train; 1 if ``--check`` finds a difference."""
    parser = flags(__doc__)
    add = parser.add_argument
    add("--latents", help="folder of samples; default: random ones")
    add("--samples", type=int, default=64, help="number of random ones")
    add("--size", type=int, nargs="+", default=[128, 128], help="of their latents")
    add("--text-tokens", type=int, default=512, help="of random samples")
    add("--sequence-parallel-size", type=int, default=0, help="ranks that share a sample (0: all)")
    add("--deepspeed", default="{}", help="JSON, or a file of it")
    add("--batch-size", type=int, default=1, help="samples of a replica and step")
    add("--steps", type=int, default=1000)
    add("--lr", type=float, default=1e-5)
    add("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    add("--lora", type=int, default=0, metavar="RANK", help="train low-rank matrices (0: all)")
    add("--gradient-checkpointing", action="store_true", help="recompute blocks: less memory")
    add("--check", action="store_true", help="in fp32, and compare the losses with one rank's")
    args = parser.parse_args(argv)
    prepare_deepspeed()
    device = start(args)
    deepspeed.init_distributed(dist_init_required=False)
    fp32 = args.check or args.device == "cpu"
    args.dtype = torch.float32 if fp32 else torch.bfloat16
    transformer, optimizer = transformer_of(args)
    config = transformer.config
    mesh = mesh_of(config.num_attention_heads, args.ulysses_degree, args.sequence_parallel_size)
    replicas, replica = dist.get_world_size() // mesh.sp_degree, dist.get_rank() // mesh.sp_degree
    enable(transformer, mesh, kernel=args.kernel)  # before DeepSpeed takes it
    settings = {"train_micro_batch_size_per_gpu": args.batch_size, "bf16": {"enabled": not fp32}}
    settings["gradient_clipping"] = 0.0 if args.check else 1.0  # one_rank clips nothing
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    is_json = args.deepspeed.lstrip().startswith("{")
    settings |= json.loads(args.deepspeed if is_json else Path(args.deepspeed).read_text())
    engine, *_ = deepspeed.initialize(model=transformer, optimizer=optimizer, config=settings)
    losses = []
    for step in range(args.steps):
        first = (step * replicas + replica) * args.batch_size
        loss = loss_of(args, engine, config, device, first)
        engine.backward(loss)  # DeepSpeed averages gradients over all ranks
        engine.step()
        dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        losses.append(float(loss))
        print0(f"step {step}: loss {losses[-1]:.7f}")
    save(Path(args.output), engine, transformer, args.lora)
    compare = args.check and dist.get_rank() == 0
    passed = not compare or same_losses(losses, one_rank(args, config, device, replicas))
    dist.barrier()  # until rank 0 has compared
    return int(not passed)


if __name__ == "__main__":
    raise SystemExit(run(main))
