"""Generate an image (Flux) or a video (Wan 2.1, 2.2), each sampling step on all ranks.

    torchrun --nproc-per-node 4 generate.py --tiny flux --device cpu --check 4
    torchrun --nproc-per-node 2 generate.py --model black-forest-labs/FLUX.1-dev --prompt "a cat"

Rank 0 encodes the prompt, shows the progress, decodes, and writes ``latents.safetensors`` and
``image.png`` or ``video.mp4`` (without imageio: ``video.gif``) to the folder ``--output``.
"""

import diffusers
import torch
import torch.distributed as dist
from common import flags, from_rank0, mesh_of, print0, run, start, tiny_pipeline, write
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_usp import ConfigError
from ds_usp.integrations.diffusers import enable

LIMIT = 1e-5  # relative difference in fp32; in bf16 twice what another kernel makes


def pipeline_of(args):
    """The pipeline, in host memory; only rank 0 has text encoders.

    Raises:
        ConfigError: of another class than Flux and Wan.
    """
    if args.tiny:
        return tiny_pipeline(args.tiny)
    config = diffusers.DiffusionPipeline.load_config(args.model)
    text = [n for n in config if n.startswith(("text_encoder", "tokenizer"))]
    left_out = dict.fromkeys(text) if dist.get_rank() else {}
    dtypes = {"vae": torch.float32, "default": torch.bfloat16}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(args.model, dtype=dtypes, **left_out)
    if not isinstance(pipeline, diffusers.FluxPipeline | diffusers.WanPipeline):
        raise ConfigError(f"{type(pipeline).__name__} is neither FluxPipeline nor WanPipeline")
    return pipeline


def load(args, device):
    """The pipeline on this rank's device, and what stands for its prompt, from rank 0."""
    options = {"height": args.height, "width": args.width, "num_inference_steps": args.steps}
    pipeline = pipeline_of(args)
    given = from_rank0(lambda: embeddings(pipeline, args, device))
    options |= {name: x.to(device) for name, x in given.items() if x is not None}
    for name in [n for n in pipeline.components if n.startswith("text_encoder")]:
        setattr(pipeline, name, None)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if isinstance(pipeline, diffusers.WanPipeline):
        options["num_frames"] = args.num_frames
    if args.guidance_scale is not None:
        options["guidance_scale"] = args.guidance_scale
    pipeline.to(device).set_progress_bar_config(disable=dist.get_rank() > 0)
    return pipeline, options


def embeddings(pipeline, args, device):
    """What the text encoders make of the prompt; a random prompt for a tiny model."""
    is_flux = isinstance(pipeline, diffusers.FluxPipeline)
    if args.tiny:
        draw = torch.Generator().manual_seed(args.seed)
        text = torch.randn(1, 7, 32, generator=draw)
        other = torch.randn((1, 32) if is_flux else (1, 9, 32), generator=draw)
    elif is_flux:
        for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
            encoder.to(device)
        text, other, _ = pipeline.encode_prompt(args.prompt, device=device)
    else:
        pipeline.text_encoder.to(device)
        text, other = pipeline.encode_prompt(args.prompt, args.negative_prompt, device=device)
    names = ("prompt_embeds", "pooled_prompt_embeds" if is_flux else "negative_prompt_embeds")
    return {name: x.detach().cpu() for name, x in zip(names, (text, other), strict=True)}


def sample(pipeline, options, seed, last, keep=0, output_type="latent"):
    """What the pipeline returns, its latents after step ``last``, where it ends, and ``keep``."""
    latents = {}

    def at_end_of_step(pipeline, step, timestep, tensors):
        if step + 1 in (last, keep):
            latents[step + 1] = tensors["latents"].float().cpu()
        pipeline._interrupt = step + 1 >= last  # diffusers' own way to leave out the other steps
        return tensors

    out = pipeline(
        **options,
        generator=torch.Generator().manual_seed(seed),  # the same noise on every rank
        output_type=output_type,
        callback_on_step_end=at_end_of_step,
    )
    return out[0], latents[last], latents.get(keep)


def check(pipeline, options, args, latents):
    """Whether the latents after ``--check`` steps are those of one rank, which computes alone."""
    alone = sample(pipeline, options, args.seed, args.check)[1]
    other = SDPBackend.EFFICIENT_ATTENTION if args.device == "cuda" else SDPBackend.MATH
    with sdpa_kernel(other), torch.compiler.set_stance("force_eager"):  # compiled: the first's
        again = sample(pipeline, options, args.seed, args.check)[1]
    difference, spread = (float((x - alone).norm() / alone.norm()) for x in (latents, again))
    limit = LIMIT if args.tiny else max(LIMIT, 2 * spread)
    passed = difference <= limit
    print0(
        f"latents after {args.check} steps: {difference:.1e} off one rank's, which are off by "
        f"{spread:.1e} with another kernel; limit {limit:.1e}: {'ok' if passed else 'FAILED'}"
    )
    return passed


def main(argv=None):
    """Generate; 1 if ``--check`` finds a difference."""
    parser = flags(__doc__, samples=True)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--negative-prompt", default="", help="of Wan")
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--num-frames", type=int, default=81, help="of Wan")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance-scale", type=float, help="default: the pipeline's")
    parser.add_argument("--compile", action="store_true", help="the blocks of the transformers")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay the steps from CUDA "
                        "graphs: faster where the CPU is slower than the GPU")  # fmt: skip
    parser.add_argument("--check", type=int, default=0, metavar="STEPS",
                        help="compare the latents after so many steps with one rank's")  # fmt: skip
    args = parser.parse_args(argv)
    if not 0 <= args.check <= args.steps:
        raise ConfigError(f"--check {args.check} is no number of steps up to --steps {args.steps}")
    device = start(args)
    pipeline, options = load(args, device)
    mesh = mesh_of(pipeline.transformer.config.num_attention_heads, args.ulysses_degree)
    rank0 = dist.get_rank() == 0
    how = {"kernel": args.kernel, "cuda_graphs": args.cuda_graphs, "cfg_degree": args.cfg_degree}
    with enable(pipeline, mesh, **how) as enabled:
        for transformer in enabled.transformers if args.compile else ():
            transformer.compile_repeated_blocks()
        given = pipeline, options, args.seed, args.steps, args.check
        kind = "pil" if rank0 else "latent"  # the other ranks decode nothing
        result, latents, kept = sample(*given, output_type=kind)
    print0(f"{args.steps} steps on ulysses {mesh.ulysses_degree} x ring {mesh.ring_degree}")
    passed = True
    if rank0:
        write(args.output, result, latents)
        passed = not args.check or check(pipeline, options, args, kept)
    dist.barrier()  # until rank 0 has compared
    return int(not passed)


if __name__ == "__main__":
    raise SystemExit(run(main))
