"""One way to run a diffusion transformer of diffusers: what ``bench_diffusers.py`` times.

All cases of a workload share one set of random weights: each has modules of its own, with other
hooks, processors and compiled blocks, but the same parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Given = dict[str, Any]
Prepared = tuple[Any, Callable[[], int]]
# The attention kernels: ds_usp's name and diffusers' backend.
KERNELS = {
    "flash4": "flash_4_hub",
    "cudnn": "_native_cudnn",
    "flash2": "_native_flash",
    "sdpa": "native",
    "eager": "_native_math",
}
# What a step is. Of "cached" FirstBlockCache, where a case has it, skips the second of two steps of
# sampling, whose latents are those of the first. "loop" are some steps of a pipeline's denoising
# loop, each from the latents of the one before; Wan's are guided, Flux's guidance is an argument.
KINDS = ("forward", "train", "guided", "cached", "loop")
SHARPNESS = 3.0  # of the norms of queries: softmax over random tokens is otherwise nearly a mean
GATES = ("norm1.linear.bias", "norm1_context.linear.bias", ".norm.linear.bias")
COMPARED = ("to_q.weight", "to_v.weight")  # gradients of the first and the last such parameter


@dataclass(frozen=True)
class Shape:
    """A transformer and the sizes of its inputs.

    Args:
        model: class of diffusers.
        config: of the class.
        sizes: by name: ``[height, width]`` of an image's tokens, ``[frames, height, width]`` of a
            video's latents.
        text: tokens of text.
    """

    model: str
    config: Mapping[str, Any]
    sizes: Mapping[str, tuple[int, ...]]
    text: int = 512


_TINY_FLUX = {
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
_TINY_FLUX2 = {
    **{key: x for key, x in _TINY_FLUX.items() if key != "pooled_projection_dim"},
    "timestep_guidance_channels": 32,
    "axes_dims_rope": [4, 4, 4, 4],
}
_TINY_WAN = {
    "in_channels": 4,
    "out_channels": 4,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
}
SHAPES = {
    "flux": Shape(
        "FluxTransformer2DModel",
        {"guidance_embeds": True},  # the other defaults are Flux.1-dev's
        {"1024": (64, 64), "2048": (128, 128)},
    ),
    "wan": Shape(
        "WanTransformer3DModel",
        {"num_layers": 10},  # the other defaults are Wan 2.1 14B's, which has 40 layers
        {"480p": (21, 60, 104), "720p": (21, 90, 160)},
    ),
    # FLUX.2-dev, 32 billion parameters.
    "flux2": Shape("Flux2Transformer2DModel", {}, {"1024": (64, 64)}),
    "wan14b": Shape("WanTransformer3DModel", {}, {"480p": (21, 60, 104), "720p": (21, 90, 160)}),
    "tiny-flux2": Shape("Flux2Transformer2DModel", _TINY_FLUX2, {"small": (6, 8)}, text=8),
    "tiny-flux": Shape("FluxTransformer2DModel", _TINY_FLUX, {"small": (6, 8)}, text=8),
    "tiny-wan": Shape("WanTransformer3DModel", _TINY_WAN, {"small": (3, 8, 8)}, text=8),
}


@dataclass(frozen=True)
class Workload:
    """``MODEL-SIZE:KIND``, a kind of :data:`KINDS`."""

    name: str

    @property
    def model(self) -> str:
        """A key of :data:`SHAPES`."""
        return self.name.partition(":")[0].rpartition("-")[0]

    @property
    def size(self) -> tuple[int, ...]:
        """Of :class:`Shape`."""
        return SHAPES[self.model].sizes[self.name.partition(":")[0].rpartition("-")[2]]

    @property
    def train(self) -> bool:
        """Whether a step is forward and backward, with gradient checkpointing."""
        return self.name.endswith(":train")

    @property
    def guided(self) -> int:
        """How many times both branches of the guidance are called; 0: one call by itself."""
        if self.loop:
            return int(self.loop == 2)
        return {"guided": 1, "cached": 2}.get(self.name.partition(":")[2], 0)

    @property
    def loop(self) -> int:
        """Of how many steps a denoising loop is; 0: a step is none."""
        return (2 if "wan" in self.model else 4) * self.name.endswith(":loop")

    @property
    def tokens(self) -> int:
        """Tokens of the attention over all."""
        tokens = math.prod(self.size)
        return tokens + SHAPES[self.model].text if "flux" in self.model else tokens // 4

    @staticmethod
    def checked(name: str) -> Workload:
        """The workload of a name.

        Raises:
            SystemExit: there is none.
        """
        known = [
            f"{model}-{size}:{kind}"
            for model, shape in SHAPES.items()
            for size in shape.sizes
            for kind in KINDS
        ]
        if name not in known:
            raise SystemExit(f"no workload {name!r}; there are: {', '.join(known)}")
        return Workload(name)


def new_transformer(model: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A transformer with random weights, the same on every rank, made on the device.

    Gates and sharp attention are set such that an error of attention changes the output.
    """
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    shape = SHAPES[model]
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            transformer: nn.Module = getattr(diffusers, shape.model)(**shape.config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if name.endswith(("norm_q.weight", "norm_added_q.weight")):
                parameter.fill_(SHARPNESS)
            elif name.endswith("scale_shift_table"):
                parameter.add_(0.5)
            elif name.endswith(GATES):
                parameter.fill_(0.5)
    return transformer


def inputs(workload: Workload, transformer: Any, device: torch.device) -> Given:
    """Arguments of a forward pass of one sample, the same on every rank; of several passes, by
    ``calls``, the sequences that steps run in turns, each call with its name and arguments."""
    draw = torch.Generator().manual_seed(1)
    given = _inputs(workload, transformer, device, draw)
    if workload.loop and not workload.guided:
        return {"loop": workload.loop, "calls": [[("", given)]]}
    if not workload.guided:
        return given
    other, sequences = _inputs(workload, transformer, device, draw), []
    for hidden_states in (given["hidden_states"], other["hidden_states"])[: workload.guided]:
        branches = zip(("cond", "uncond"), (given, other), strict=True)
        calls = [(name, {**x, "hidden_states": hidden_states}) for name, x in branches]
        sequences.append(workload.guided * calls)
    return {"calls": sequences} | ({"loop": workload.loop} if workload.loop else {})


def _inputs(
    workload: Workload, transformer: Any, device: torch.device, draw: torch.Generator
) -> Given:
    shape, config = SHAPES[workload.model], transformer.config
    dtype = next(transformer.parameters()).dtype

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=draw).to(device, dtype)

    if "wan" in workload.model:
        return {
            "hidden_states": random(1, config.in_channels, *workload.size),
            "timestep": torch.tensor([500], device=device),
            "encoder_hidden_states": random(1, shape.text, config.text_dim),
        }
    rows, columns = workload.size
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    given = {
        "hidden_states": random(1, rows * columns, config.in_channels),
        "timestep": torch.tensor([0.5], device=device, dtype=dtype),
        "encoder_hidden_states": random(1, shape.text, config.joint_attention_dim),
    }
    if "flux2" in workload.model:  # ids of time, height, width and place in the text
        given["img_ids"] = nn.functional.pad(grid, (1, 1)).to(device, dtype)[None]
        text_ids = nn.functional.pad(torch.arange(shape.text)[:, None], (3, 0))
        given["txt_ids"] = text_ids.to(device, dtype)[None]
    else:
        given["pooled_projections"] = random(1, config.pooled_projection_dim)
        given["img_ids"] = nn.functional.pad(grid, (1, 0)).to(device, dtype)
        given["txt_ids"] = torch.zeros(shape.text, 3, device=device, dtype=dtype)
    guidance = {"guidance": torch.tensor([3.5], device=device, dtype=dtype)}
    return given | (guidance if config.guidance_embeds else {})


class Step:
    """One step of a workload by one case.

    Args:
        transformer: whose parameters' gradients are dropped after each step.
        sharded: whether all ranks share it; else rank 0 runs it alone, the others do nothing.

        warm_ups: passes before the one with results.

    Attributes:
        reserved_bytes: GPU memory that torch's allocator does not count.
    """

    def __init__(
        self, transformer: nn.Module, given: Given, train: bool, sharded: bool, warm_ups: int
    ) -> None:
        self._transformer, self._given, self._train = transformer, given, train
        self._sharded, self._idle = sharded, not sharded and dist.get_rank() > 0
        self._warm_ups, self._steps = warm_ups, 0
        self.reserved_bytes: Callable[[], int] = int

    def __call__(self) -> None:
        """Run the step; results are dropped."""
        self._run()
        self._transformer.zero_grad()

    def results(self) -> list[Tensor]:
        """The output and, in training, gradients of some parameters, summed over the ranks."""
        for _ in range(self._warm_ups):
            self()
        output = self._run()
        tensors = [] if self._idle else [output, *self._gradients()]
        if self._sharded:
            for gradient in tensors[1:]:
                dist.all_reduce(gradient)
        self._transformer.zero_grad()
        return tensors

    def _run(self) -> Tensor:
        if self._idle:
            return torch.empty(0)
        with torch.set_grad_enabled(self._train):
            if "loop" in self._given:
                output = self._denoised()
            else:
                output = self._sampled() if "calls" in self._given else self._call(self._given)
        if self._train:
            output.float().square().mean().backward()
        return output.detach()

    def _call(self, given: Given) -> Tensor:
        output: Tensor = self._transformer(**given, return_dict=False)[0]
        return output

    def _sampled(self) -> Tensor:
        """As a pipeline with guidance calls its transformer: one branch after the other."""
        sequences = self._given["calls"]
        calls = sequences[self._steps % len(sequences)]
        self._steps += 1
        return self._guided(calls)

    def _denoised(self) -> Tensor:
        """Latents after the steps of Euler's method for flow matching."""
        calls = self._given["calls"][0]
        latents = calls[0][1]["hidden_states"]
        scale = 1000 if latents.ndim == 5 else 1  # Wan counts time in thousandths
        steps: int = self._given["loop"]
        for step in range(steps):
            time = scale * (1 - step / steps)
            changed = [
                (name, given | {"hidden_states": latents, "timestep": given["timestep"] * 0 + time})
                for name, given in calls
            ]
            latents = latents - self._guided(changed) / steps
        return latents

    def _guided(self, calls: Sequence[tuple[str, Given]]) -> Tensor:
        """The output of one call, or of guidance that has made several."""
        outputs = []
        for name, given in calls:
            with self._transformer.cache_context(name):
                outputs.append(self._call(given))
        if len(outputs) == 1:
            return outputs[0]
        for cond, uncond in zip(outputs[::2], outputs[1::2], strict=True):
            output = uncond + 4.0 * (cond - uncond)
        return output

    def _gradients(self) -> list[Tensor]:
        if not self._train:
            return []
        parameters = dict(self._transformer.named_parameters())
        gradients = []
        for end in COMPARED:
            of_kind = [p for name, p in parameters.items() if name.endswith(f".{end}")]
            gradients += [p.grad.clone() for p in (of_kind[0], of_kind[-1]) if p.grad is not None]
        return gradients


# ------------------------------------------------------------------ xDiT, the package xfuser

# xfuser 0.7 is imported when a case is prepared: it needs a GPU and triton at import.
# Of a class of diffusers: the module and the class of the wrapper.
XDIT_WRAPPERS = {
    "FluxTransformer2DModel": ("transformer_flux", "xFuserFlux1Transformer2DWrapper"),
    "WanTransformer3DModel": ("transformer_wan", "xFuserWanTransformer3DWrapper"),
}
# Of a kernel's name in ds_usp: the attention backend of xfuser.
XDIT_BACKENDS = {
    "flash4": "flash_4",
    "cudnn": "cudnn",
    "flash2": "sdpa_flash",
    "sdpa": "sdpa",
    "eager": "sdpa_math",
}
CACHE_DIT_BACKENDS = {"cudnn": "_sdpa_cudnn", "flash2": "flash", "sdpa": "native"}  # cache-dit 1.5
# Groups of its parallel_state, all of which a new mesh replaces.
XDIT_GROUPS = ("_MODEL_REPLICA", "_DP", "_CFG", "_PP", "_SP", "_TP", "_FS", "_VAE", "_DIT")


def of_xdit(
    kernel: str, ulysses: int, ring: int, transformer: Any
) -> tuple[Any, Callable[[], int]]:
    """xDiT's wrapper with a transformer's weights, on ulysses x ring.

    Returns:
        The wrapper, and a function of the GPU memory that torch's allocator does not count.

    Raises:
        ValueError: training; its all-to-alls have no gradients.
        ImportError: xfuser, or what it imports, is not installed.
        NotImplementedError: of xfuser, on a machine without an accelerator.
        RuntimeError: of xfuser, for a kernel without log-sum-exp and a ring.
    """
    if transformer.training:
        raise ValueError("xDiT is for sampling: its all-to-alls have no gradients")
    heads = transformer.config.num_attention_heads
    wrapper = _xdit_wrapper_of(transformer, _xdit_globals_of(kernel, ulysses, ring, heads))
    return wrapper, int


def _xdit_wrapper_of(transformer: Any, set_globals: Callable[..., None]) -> Any:
    """The wrapper of a transformer's class with the same weights, called on a mesh's globals."""
    from importlib import import_module

    from accelerate import init_empty_weights

    module, name = XDIT_WRAPPERS[type(transformer).__name__]
    set_globals()
    wrappers = import_module(f"xfuser.model_executor.models.transformers.{module}")
    with init_empty_weights(include_buffers=False):
        wrapper = getattr(wrappers, name).from_config(transformer.config)
    wrapper.load_state_dict(transformer.state_dict(), assign=True)
    wrapper.to(transformer.device).eval()  # .to() moves buffers
    wrapper.register_forward_pre_hook(set_globals)
    return wrapper


@lru_cache
def _xdit_globals_of(kernel: str, ulysses: int, ring: int, heads: int) -> Callable[..., None]:
    """Makes a mesh and a runtime state; a function that sets xfuser's globals to them."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import parallel_state, runtime_state
    from yunchang.globals import PROCESS_GROUP

    backend, rank = dist.get_backend(), dist.get_rank()
    parallel_state.init_distributed_environment(dist.get_world_size(), rank, backend=backend)
    for name in XDIT_GROUPS:
        setattr(parallel_state, name, None)  # those of another mesh stay in its function
    degrees = {"ulysses_degree": ulysses, "ring_degree": ring}
    parallel_state.initialize_model_parallel(**degrees, backend=backend)
    arguments = xFuserArgs(**degrees, attention_backend=XDIT_BACKENDS[kernel])
    pipeline: Any = SimpleNamespace(
        transformer=SimpleNamespace(config=SimpleNamespace(num_attention_heads=heads))
    )
    runtime_state.initialize_runtime_state(pipeline, arguments.create_config()[0])
    # Flux's single blocks read it, for pipeline parallelism.
    runtime_state.get_runtime_state().max_condition_sequence_length = 0
    mesh_groups = ("ULYSSES_PG", "RING_PG")
    names = [(parallel_state, name) for name in XDIT_GROUPS]
    names += [(runtime_state, "_RUNTIME"), *((PROCESS_GROUP, name) for name in mesh_groups)]
    values = [(holder, name, getattr(holder, name)) for holder, name in names]

    def set_globals(*_: Any) -> None:
        for holder, name, value in values:
            setattr(holder, name, value)

    return set_globals


def of_cache_dit(kernel: str, ulysses: int, ring: int, transformer: Any) -> Prepared:
    """cache-dit's own context parallelism, without a cache; it sets diffusers' attention backend
    for the whole process, so run it in one of its own (``--cases``)."""
    if transformer.training:
        raise ValueError("cache-dit is for sampling")
    from cache_dit.distributed import ParallelismConfig, enable_parallelism

    if not torch.accelerator.is_available():
        torch.accelerator.device_count = dist.get_world_size
    degrees = {"ulysses_size": ulysses} if ulysses > 1 else {"ring_size": ring}
    config = ParallelismConfig(**degrees, attention_backend=CACHE_DIT_BACKENDS[kernel])
    return enable_parallelism(transformer, config), int


@dataclass(frozen=True)
class Case:
    """A way to run a transformer.

    Args:
        prepare: changes or wraps the modules of a case, called on every rank; returns what is run
            and a function of the GPU memory that torch's allocator does not count.
        compiled: whether the repeated blocks are.
        sharded: see :class:`Step`.
        graphs: whether passes are replayed from CUDA graphs from the third on.
        guided, cached: only in workloads of this kind; with FirstBlockCache.
    """

    prepare: Callable[[Any], Prepared]
    compiled: bool = False
    sharded: bool = True
    graphs: bool = False
    guided: bool = False
    cached: bool = False

    def step(self, transformer: nn.Module, given: Given, train: bool) -> Step:
        """A step on a copy of the modules, with the same parameters.

        Raises:
            ValueError: a case of another kind of workloads.
        """
        sequences = given.get("calls", ())
        if (self.guided and not sequences) or (self.cached and len(sequences) < 2):
            raise ValueError("this case is for other kinds of steps")
        shared = {id(x): x for x in (*transformer.parameters(), *transformer.buffers())}
        modules: Any = copy.deepcopy(transformer, shared)
        modules.train(train)
        if train:
            modules.enable_gradient_checkpointing()
        if self.cached:  # before diffusers' context parallelism, which else fails
            from diffusers import FirstBlockCacheConfig

            modules.enable_cache(FirstBlockCacheConfig(threshold=0.05))
        modules, reserved_bytes = self.prepare(modules)
        step = Step(modules, given, train, self.sharded, 2 if self.graphs else 0)
        step.reserved_bytes = reserved_bytes
        if self.compiled:
            modules.compile_repeated_blocks(dynamic=False)
        return step


def set_backend(transformer: Any, kernel: str, of: str = "*") -> None:
    """Let diffusers' attention run on a kernel, without its global setting.

    FlashAttention-4 is taken from ``flash_attn.cute``, where diffusers takes it from a hub.

    Args:
        of: a pattern of the attention modules' names.
    """
    from diffusers.models import attention_dispatch as dispatch

    backend = dispatch.AttentionBackendName(KERNELS[kernel])
    if kernel == "flash4":
        from flash_attn.cute import flash_attn_func

        dispatch._HUB_KERNELS_REGISTRY[backend].kernel_fn = flash_attn_func
    for name, processor in transformer.attn_processors.items():
        if fnmatch(name, f"{of}.processor"):
            processor._attention_backend = backend


def alone(kernel: str, transformer: Any) -> Prepared:
    """diffusers as it is."""
    set_backend(transformer, kernel)
    return transformer, int


def of_ds_usp(
    kernel: str, ulysses: int, transformer: Any, cuda_graphs: bool = False, cfg_degree: int = 1
) -> Prepared:
    """Enabled on ulysses x ring over all ranks, or over as many for each branch of the guidance;
    local cross-attention is diffusers' own, on the same kernel.

    Raises:
        ValueError: CUDA graphs in training, of which ds_usp makes none.
    """
    from ds_usp.integrations.diffusers import PLANS, enable

    if cuda_graphs and transformer.training:
        raise ValueError("passes with gradients are not captured in CUDA graphs")
    mesh = _mesh_of_ds_usp(ulysses)
    for path in PLANS[type(transformer).__name__].local:
        set_backend(transformer, kernel, of=path)
    options: Any = {"cuda_graphs": cuda_graphs, "cfg_degree": cfg_degree}
    enable(transformer, mesh, kernel=kernel, gradients="sum", **options)
    return transformer, lambda: mesh.reserved_bytes


@lru_cache
def _mesh_of_ds_usp(ulysses: int) -> Any:
    from ds_usp import SequenceMesh

    return SequenceMesh.from_group(None, ulysses)


def of_diffusers(kernel: str, ulysses: int, ring: int, transformer: Any) -> Prepared:
    """diffusers' own context parallelism."""
    from diffusers import ContextParallelConfig

    if not torch.accelerator.is_available():  # diffusers divides by the number of devices
        torch.accelerator.device_count = dist.get_world_size
    set_backend(transformer, kernel)
    degrees = {"ulysses_degree": ulysses, "ring_degree": ring}
    config = ContextParallelConfig(**degrees, mesh=_mesh_of_diffusers(ulysses, ring))
    transformer.enable_parallelism(config=config)
    return transformer, int


@lru_cache
def _mesh_of_diffusers(ulysses: int, ring: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    kind = torch._C._get_accelerator().type
    return init_device_mesh(kind, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def cases(world: int, kernels: Sequence[str], compiled: Sequence[bool]) -> dict[str, Case]:
    """All cases by name; the first is what the others are compared with."""
    by_name = {}
    for kernel in kernels:
        for compile_it in compiled:
            end = f"{' compiled' if compile_it else ''}, {kernel}"
            by_name[f"one GPU{end}"] = Case(partial(alone, kernel), compile_it, sharded=False)
            degrees = [(u, world // u) for u in range(world, 0, -1) if world % u == 0]
            for ulysses, ring in degrees:
                prepare = partial(of_ds_usp, kernel, ulysses)
                by_name[f"ds_usp {ulysses}x{ring}{end}"] = Case(prepare, compile_it)
                prepare = partial(of_ds_usp, kernel, ulysses, cuda_graphs=True)
                by_name[f"ds_usp {ulysses}x{ring} graphs{end}"] = Case(
                    prepare, compile_it, graphs=True
                )
                by_name[f"ds_usp {ulysses}x{ring} cached{end}"] = Case(
                    partial(of_ds_usp, kernel, ulysses), compile_it, cached=True
                )
            by_name[f"one GPU cached{end}"] = Case(
                partial(alone, kernel), compile_it, sharded=False, cached=True
            )
            # A branch takes half of the mesh's ring.
            for ulysses, ring in [(u, world // u) for u, r in degrees if r % 2 == 0]:
                mesh_name = f"ds_usp cfg 2x{ulysses}x{ring // 2}"
                prepare = partial(of_ds_usp, kernel, ulysses, cfg_degree=2)
                graphed = partial(prepare, cuda_graphs=True)
                by_name |= {
                    f"{mesh_name}{end}": Case(prepare, compile_it, guided=True),
                    f"{mesh_name} graphs{end}": Case(graphed, compile_it, graphs=True, guided=True),
                    f"{mesh_name} cached{end}": Case(prepare, compile_it, cached=True),
                }
            if world > 1:
                for kind, mesh in {"ulysses": (world, 1), "ring": (1, world)}.items():
                    prepare = partial(of_diffusers, kernel, *mesh)
                    by_name[f"diffusers {kind} {world}{end}"] = Case(prepare, compile_it)
                    prepare = partial(of_cache_dit, kernel, *mesh)
                    by_name[f"cache-dit {kind} {world}{end}"] = Case(prepare, compile_it)
                prepare = partial(of_diffusers, kernel, world, 1)
                by_name[f"diffusers ulysses {world} cached{end}"] = Case(
                    prepare, compile_it, cached=True
                )
                for ulysses, ring in degrees:
                    prepare = partial(of_xdit, kernel, ulysses, ring)
                    by_name[f"xdit {ulysses}x{ring}{end}"] = Case(prepare, compile_it)
    return by_name
