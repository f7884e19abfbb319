"""``enable_vae``: the tiles that a VAE of diffusers decodes and encodes, shared by the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from ds_usp.comm.mesh import SequenceMesh, check_mesh
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.integrations.model_comparison import ModelComparison, gathered_values
from ds_usp.integrations.replicas import same_on_all_ranks
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.memory.saved_attention import RandomState

# Note [tiles that are computed later]
#
# A class of diffusers computes its tiles one after the other, then blends them; each class by a
# function of its own (`tiled_decode`), some with caches of convolutions from one frame to the next.
# None of that is written again here. While a class's own function runs, its encoder and decoder are
# replaced by functions that compute nothing: they note the call and return a `_Deferred`. The first
# time that a value is needed, as when blending reads a shape, all calls that were noted are shared
# by the ranks, computed, and sent to everybody; the function then goes on as if each had run in its
# turn. So tiling and blending are diffusers', to the bit.
#
# Which calls belong to one tile follows from data: they hand each other an output (`conv_cache` of
# CogVideoX, the output of an encoder to `quant_conv`), or write into one list (`feat_cache` of Wan
# and QwenImage). Classes whose modules keep caches in themselves would hide that, and those that
# blend a tile before they compute the next one would wait for each: they have no row.
#
# By class, how many outputs its encoder and decoder have: the second is a cache for later frames.
TILED: Mapping[str, int] = MappingProxyType(
    {
        "AutoencoderKL": 1,
        "AutoencoderKLFlux2": 1,
        "AutoencoderKLWan": 1,
        "AutoencoderKLQwenImage": 1,
        "AutoencoderKLHunyuanVideo": 1,
        "AutoencoderKLHunyuanVideo15": 1,
        "AutoencoderKLHunyuanImage": 1,
        "AutoencoderKLCogVideoX": 2,
        "AutoencoderKLLTXVideo": 1,
        "AutoencoderKLLTX2Video": 1,
        "AutoencoderDC": 1,
    }
)
_MODULES = ("encoder", "quant_conv", "decoder")
_TILED_FUNCTIONS = (
    *("tiled_encode", "_tiled_encode", "tiled_decode", "_tiled_decode"),
    *("_temporal_tiled_encode", "_temporal_tiled_decode"),
)


def enable_vae(vae_or_pipeline: nn.Module | DiffusionPipeline, mesh: SequenceMesh) -> EnabledVAE:
    """Share the tiles of a VAE's ``decode`` and ``encode`` among the ranks of a mesh.

    Every rank calls it, and later ``decode`` and ``encode``, with the same latents or images, and
    gets all of the result, equal to that of diffusers' own tiling on one rank. A rank's memory is
    that of one tile being computed, and of the tiles that are joined. An image that diffusers does
    not tile, as it is small, is computed by every rank. For sampling: no gradients.

    Args:
        vae_or_pipeline: a VAE of a class of :data:`TILED`, whose ``enable_tiling`` was called, or a
            pipeline with one.

    Raises:
        ConfigError: tiling is off, the VAE is enabled on this mesh already, or sizes and strides of
            tiles do not fit each other.
        UnsupportedAttentionError: a class without a row.
        MeshError: on every rank, if their VAEs differ; collective over the mesh.
    """
    check_mesh(mesh)
    vae: Any = vae_or_pipeline
    with mesh.agreeing("enable_vae") as words:
        if isinstance(vae_or_pipeline, DiffusionPipeline):
            vae = getattr(vae_or_pipeline, "vae", None)
        name = type(vae).__name__
        words.append(name)
        if name not in TILED:
            raise UnsupportedAttentionError(
                f"{name} is no VAE whose tiles ranks can share; these can: "
                f"{', '.join(TILED)}. Let every rank decode by itself, or one rank alone "
                "(output_type='latent' on the others)"
            )
        bound = vars(vae).get("decode")
        if isinstance(bound, _Bound) and bound.enabled.mesh is mesh:
            raise ConfigError(f"this {name} is enabled already: disable() the first one")
        if not vae.use_tiling:
            raise ConfigError(
                f"{name} does not tile: call enable_tiling() first, on every rank. Its result is "
                "then that of diffusers' tiling, which differs a little from that without"
            )
        check_tiles(vae)
    model = ModelComparison(mesh, vae)
    model.begin(f"enable_vae {name}", "")
    if isinstance(bound, _Bound):  # of another mesh, which no rank leaves before all agree
        bound.enabled.disable()
    return EnabledVAE(vae, mesh, model)


class EnabledVAE(AbstractContextManager["EnabledVAE"]):
    """A VAE whose tiles are shared by ranks; as a context manager it is disabled at the end.

    Attributes:
        vae: the VAE.
        mesh: the ranks that share its tiles.
    """

    def __init__(self, vae: Any, mesh: SequenceMesh, model: ModelComparison) -> None:
        self.vae, self.mesh = vae, mesh
        self._model, self._tiles = model, _Tiles(mesh, type(vae).__name__)
        self._replaced = {}
        for name in ("encode", "decode", *_TILED_FUNCTIONS):
            original = getattr(vae, name, None)
            if original is not None:
                self._replaced[name] = vars(vae).get(name)
                setattr(vae, name, _Bound(self, name, original))

    def disable(self) -> None:
        """Leave the VAE as it was; communicates nothing."""
        for name, before in self._replaced.items():
            if isinstance(vars(self.vae).get(name), _Bound):  # else it was replaced since
                delattr(self.vae, name)
                if before is not None:
                    setattr(self.vae, name, before)
        self._replaced.clear()
        self._model.leave()

    def __exit__(self, *_: object) -> None:
        self.disable()

    @disable_in_compile("ranks compare what they decode")
    def _run_whole(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # In place of encode and decode. Collective, whether or not the VAE tiles this image.
        call = f"{name} of {type(self.vae).__name__} (call it on every rank, with the same values),"
        with same_on_all_ranks(self.mesh, call, {"given": args, **kwargs}, self._model):
            check_tiles(self.vae)
            inputs = (*args, *kwargs.values(), *self.vae.parameters())
            if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs):
                raise UnsupportedAttentionError(
                    f"{type(self.vae).__name__}.{name} with gradients: tiles of other ranks have "
                    "none. Call it under torch.no_grad(), or disable() to train the VAE"
                )
        with self.mesh.consistency.forward_pass_of(type(self.vae).__name__):
            out = original(*args, **kwargs)
        self._model.end_of_forward()
        return out

    @disable_in_compile("tiles are shared by ranks")
    def _run_tiled(self, _: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._tiles.is_noting:  # within that of frames, which calls that of heights and widths
            return original(*args, **kwargs)
        with self._tiles.noting(self.vae):
            return original(*args, **kwargs)


class _Bound:
    """Runs an :class:`EnabledVAE` in the place of a method of the VAE. It is no function, so that
    ``copy.deepcopy`` of the VAE copies the :class:`EnabledVAE` too."""

    def __init__(self, enabled: EnabledVAE, name: str, original: Callable[..., Any]) -> None:
        self.enabled, self._name, self._original = enabled, name, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_tiled = self._name in _TILED_FUNCTIONS
        run = self.enabled._run_tiled if is_tiled else self.enabled._run_whole
        return run(self._name, self._original, *args, **kwargs)


def check_tiles(vae: Any) -> None:
    """ConfigError for tiles whose sizes, in pixels and in latents, do not fit each other.

    diffusers rounds them down: each tile would be put where its neighbour has other pixels.
    """
    for axis in ("size", "height", "width", "num_frames"):
        sample = getattr(vae, f"tile_sample_min_{axis}", None)
        if sample is None:
            continue
        stride = getattr(vae, f"tile_sample_stride_{axis}", None)
        if axis == "num_frames":
            ratio = getattr(vae, "temporal_compression_ratio", 1)
            fits = stride is None or (sample % ratio == 0 and stride % ratio == 0)
        elif stride is not None:
            ratio = vae.spatial_compression_ratio
            fits = sample % ratio == 0 and stride % ratio == 0
        else:
            latent = getattr(vae, f"tile_latent_min_{axis}")
            ratio = sample // max(latent, 1)
            factor = getattr(vae, f"tile_overlap_factor_{axis}", None)
            factor = vae.tile_overlap_factor if factor is None else factor
            stride = int(sample * (1 - factor))
            # What blending keeps of a tile, and from one tile to the next, in pixels and latents.
            kept, kept_latent = sample - int(sample * factor), latent - int(latent * factor)
            step = int(latent * (1 - factor))
            fits = (ratio * latent, ratio * step, ratio * kept_latent) == (sample, kept, stride)
        if not fits or not (stride is None or 0 < stride <= sample):
            raise ConfigError(
                f"{type(vae).__name__}: tiles of {axis} {sample}, one each {stride}, do not fit "
                f"its latents, of which each has {ratio}: use multiples of {ratio} for both, and "
                "a stride of at most the size (enable_tiling(...), or an overlap factor that gives "
                "whole latents)"
            )


# ------------------------------------------------------------------ calls that are noted


class _Deferred:
    """The output of a call that was noted; a tensor to everything else."""

    __hash__ = object.__hash__

    def __init__(self, tiles: _Tiles, chain: _Chain) -> None:
        self.tiles, self.chain = tiles, chain
        # None until it is computed. Ends of chains then stay, on all ranks; others are freed.
        self.value: Tensor | None = None

    def materialize(self) -> Tensor:
        """The tensor; computes and exchanges all tiles if it has to. Collective then."""
        if self.value is None:
            self.tiles.compute()
        if self.value is None:  # another noted call has taken it: only a chain's ends are sent
            raise UnsupportedAttentionError(
                f"{self.tiles.name} uses a part of a tile outside of it: ranks cannot share its "
                "tiles; disable()"
            )
        return self.value

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        parts = args[0] if function is torch.cat and args else ()
        if parts and all(type(x) is _Deferred and x.value is None for x in parts):
            chains = {id(x.chain) for x in parts}
            if len(chains) == 1:  # the frames of one tile
                tiles, args = parts[0].tiles, (list(parts), *args[1:])
                return tiles.note(torch.cat, 1, parts, args, kwargs or {})
        return function(*_materialized(args), **_materialized(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

    def __getitem__(self, index: Any) -> Any:
        return _View(self, index) if self.value is None else self.value[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.materialize()[index] = value


class _View(_Deferred):
    """A part of a deferred output, as a tile without its first frame."""

    def __init__(self, whole: _Deferred, index: Any) -> None:
        super().__init__(whole.tiles, whole.chain)
        self._whole, self._index = whole, index

    def materialize(self) -> Tensor:
        if self.value is None:
            self.value = self._whole.materialize()[self._index]
        return self.value


def _materialized(value: Any) -> Any:
    """Return ``value`` with tensors in place of deferred outputs. A list without any is returned
    itself, not copied: what is called may write into it."""
    if isinstance(value, _Deferred):
        return value.materialize()
    if isinstance(value, dict):
        return {k: _materialized(x) for k, x in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_materialized(x) for x in value]
        unchanged = all(x is y for x, y in zip(items, value, strict=True))
        return value if unchanged else type(value)(items)
    return value


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[_Deferred, ...]

    def run(self) -> None:
        out = self.function(*_materialized(self.args), **_materialized(self.kwargs))
        for later, x in zip(self.outputs, (out,) if len(self.outputs) == 1 else out, strict=True):
            later.value = x


class _Chain:
    """The calls of one tile, in their order.

    Attributes:
        size: elements that go into them, to which their time is proportional.
        device: that of their tensors.
        ends: outputs that no other call has taken, as they will be blended: these alone are sent.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.size, self.device = 0, torch.device("cpu")
        self.ends: list[_Deferred] = []

    def run(self) -> None:
        """Compute the ends on this rank; other outputs are freed after the last call that takes
        them. No call is left."""
        outputs: set[_Deferred] = set()
        self.calls.reverse()
        while self.calls:
            call = self.calls.pop()
            call.run()
            outputs.update(call.outputs)
            for unneeded in outputs.difference(self.ends, *map(_deferred_in, self.calls)):
                unneeded.value = None


def _deferred_in(call: _Call) -> Iterator[_Deferred]:
    for x in (*call.args, *call.kwargs.values()):
        yield from (y for y in (x if isinstance(x, list) else [x]) if isinstance(y, _Deferred))


class _Noted:
    """A module whose calls are noted; QwenImage counts the convolutions inside."""

    def __init__(self, tiles: _Tiles, module: Any, num_outputs: int) -> None:
        self._tiles, self._module, self._num_outputs = tiles, module, num_outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tiles.note(self._module, self._num_outputs, args, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Tiles:
    """The calls that one tiled function has noted, computed when their values are needed."""

    def __init__(self, mesh: SequenceMesh, name: str) -> None:
        self.mesh, self.name, self.is_noting = mesh, name, False
        self._chains: list[_Chain] = []
        self._chain_of_list: dict[int, _Chain] = {}  # by id, of a list that a tile's calls share

    @contextmanager
    def noting(self, vae: Any) -> Iterator[None]:
        """Note the calls of the VAE's modules in the body; what is not computed then is dropped."""
        modules = {x: m for x in _MODULES if (m := getattr(vae, x, None)) is not None}
        # In the instance, where they are found before its modules: hooks, offloading and compiled
        # forwards of these run as ever, when they are called.
        for name, module in modules.items():
            num_outputs = 1 if name == "quant_conv" else TILED[self.name]
            vars(vae)[name] = _Noted(self, module, num_outputs)
        self.is_noting = True
        try:
            yield
        finally:
            self.is_noting = False
            for name in modules:
                vars(vae).pop(name, None)
            self._chains.clear()
            self._chain_of_list.clear()

    def note(
        self,
        function: Callable[..., Any],
        num_outputs: int,
        taken: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Note the call ``function(*args, **kwargs)``; returns a :class:`_Deferred` for its output,
        or a tuple of them for several.

        Args:
            taken: tensors, outputs and lists in ``args``, which this call alone takes, so that they
                are no ends of their tile any more.
        """
        inputs = (*taken, *kwargs.values())
        lists = [x for x in inputs if isinstance(x, list)]
        chains = [x.chain for x in inputs if isinstance(x, _Deferred) and x.value is None]
        chains += [self._chain_of_list[id(x)] for x in lists if id(x) in self._chain_of_list]
        if not chains:  # the first call of a tile
            chains = [_Chain()]
            self._chains += chains
        chain = chains[0]
        self._chain_of_list.update({id(x): chain for x in lists})
        for x in inputs:
            if isinstance(x, Tensor):
                chain.size, chain.device = chain.size + x.numel(), x.device
        chain.ends = [x for x in chain.ends if not any(x is y for y in inputs)]
        deferred = tuple(_Deferred(self, chain) for _ in range(num_outputs))
        chain.ends.append(deferred[0])  # a second one is a cache, which is not blended
        chain.calls.append(_Call(function, args, kwargs, deferred))
        return deferred[0] if num_outputs == 1 else deferred

    def compute(self) -> None:
        """Compute this rank's share of the tiles, and give every rank all of them. Collective."""
        chains, self._chains, self._chain_of_list = self._chains, [], {}
        if not chains:  # all are computed, or a call of a tile reads a value while it is computed
            return
        owners = assign([chain.size for chain in chains], self.mesh.sp_degree)
        rank, group = self.mesh.rank, self.mesh.sp_group
        with self.mesh.agreeing(f"{len(chains)} tiles of {self.name}"):
            for chain, owner in zip(chains, owners, strict=True):
                if owner == rank:
                    with _draws_nothing(self.name, chain.device):
                        chain.run()
                else:
                    chain.calls.clear()
        if group is not None:
            self._exchange(chains, owners, group)
        for chain in chains:  # which its ends refer to: such a cycle would be freed late
            chain.ends.clear()

    def _exchange(
        self, chains: Sequence[_Chain], owners: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        # Broadcasts each chain's ends from the rank that has computed them. The others learn their
        # shapes first: each rank gives those of its own chains, in the order of all chains.
        values = [x.value for chain in chains for x in chain.ends if x.value is not None]
        shapes = [(list(x.shape), str(x.dtype).removeprefix("torch.")) for x in values]
        rank_shapes = [iter(each) for each in gathered_values(self.mesh, shapes)]
        sent = []
        for chain, owner in zip(chains, owners, strict=True):
            for x in chain.ends:
                shape, dtype = next(rank_shapes[owner])
                if x.value is None:
                    options = {"dtype": getattr(torch, dtype), "device": chain.device}
                    x.value = torch.empty(shape, **options)
                x.value = x.value.contiguous()
                sent.append(dist.broadcast(x.value, group=group, group_src=owner, async_op=True))
        for work in sent:
            work.wait()


@contextmanager
def _draws_nothing(name: str, device: torch.device) -> Iterator[None]:
    # A rank that draws for its own tiles only would give them other noise than one rank does, and
    # its generator would be ahead of the others' from then on.
    before = RandomState.capture(device)
    yield
    if not before.is_unchanged():
        raise UnsupportedAttentionError(
            f"{name} draws random numbers for each tile, as with dropout in training mode or "
            "injected noise: call eval(), or let every rank decode by itself (disable())"
        )


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that computes each tile, by ``sizes``: the largest first, each to the one with
    least; every rank must get the same answer."""
    loads, owners = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner = loads.index(min(loads))
        owners[index], loads[owner] = owner, loads[owner] + sizes[index]
    return owners
