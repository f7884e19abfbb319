"""Caches of diffusers that skip blocks of some passes, on the ranks of a mesh.

``ShardedTransformer`` asks for them before each pass; :func:`_changed` alone communicates.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import UnsupportedAttentionError
from ds_usp.memory.compile_guard import disable_in_compile

# Note [a cache on a mesh]
# A cache keeps what blocks have added to the tokens and adds it again in later passes. To keep and
# to add is done for each token by itself, so each rank does it with its shard. To decide whether a
# pass is computed is not: ranks that decide otherwise wait for each other in attention, and a mesh
# that decides by the tokens of one shard skips other passes than one process would. Some caches
# decide by the number of the step, which ranks have in common. FirstBlockCache asks how much the
# first block's residual has changed: here a mean over the tokens of all ranks.


class _Cache(NamedTuple):
    """Describes a cache of diffusers.

    Args:
        by_residual: it decides by what tokens are, else by the number or the time of a step.
        by_branch: its state is kept for each branch, by diffusers' cache context.
        whole_batch: it knows both branches by their places in the batch.
    """

    by_residual: bool = False
    by_branch: bool = True
    whole_batch: bool = False


# By the name of diffusers' hook that decides. Hooks that follow its decision are FOLLOWERS.
CACHES: Mapping[str, _Cache] = MappingProxyType(
    {
        "fbc_leader_block_hook": _Cache(by_residual=True),
        "mag_cache_leader_block_hook": _Cache(),
        "taylorseer_cache": _Cache(),
        "pyramid_attention_broadcast": _Cache(by_branch=False),
        "faster_cache_denoiser": _Cache(by_branch=False, whole_batch=True),
        "faster_cache_block": _Cache(by_branch=False, whole_batch=True),
    }
)
FOLLOWERS = frozenset({"fbc_block_hook", "mag_cache_block_hook"})


def hooks_of(transformer: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Path, name and hook of diffusers' hooks on the modules of a transformer."""
    for path, module in transformer.named_modules():
        registry = vars(module).get("_diffusers_hook")  # a thousand modules, in every pass
        if registry is not None:
            yield from ((path, name, hook) for name, hook in registry.hooks.items())


class Caches:
    """The caches that a transformer has now; false if it has none. Made in every pass.

    Args:
        hooks: of :func:`hooks_of`.

    Attributes:
        text: what ranks compare: which hooks are where, with their plain settings; "" for none.
    """

    def __init__(self, transformer: nn.Module, hooks: list[tuple[str, str, Any]]) -> None:
        self._name = type(transformer).__name__
        cache_hooks = [
            (path, name, hook) for path, name, hook in hooks if name in CACHES or name in FOLLOWERS
        ]
        self._hooks = [(name, hook) for _, name, hook in cache_hooks if name in CACHES]
        # cache-dit 1.5 marks what it has wrapped; its own all-reduce averages over all ranks.
        self._is_cache_dit = bool(getattr(transformer, "_is_cached", False))
        every = [f"{path} {name} {_settings(hook)}" for path, name, hook in cache_hooks]
        wrapper = ["cache-dit"] * self._is_cache_dit
        names = dict.fromkeys((*(name for _, name, _ in cache_hooks), *wrapper))
        first = next((_settings(hook) for _, hook in self._hooks), "")
        places = f"{first} at {len(every)} places ({zlib.crc32(repr(every).encode()):08x})"
        self.text = f"{' '.join(names)} {places}" if names else ""

    def __bool__(self) -> bool:
        return bool(self.text)

    def check(self, splits_branches: bool, splits_samples: bool, has_context: bool) -> None:
        """UnsupportedAttentionError for a cache that would decide otherwise than on one process.

        Args:
            splits_branches: parts of the mesh compute the calls of a step.
            splits_samples: they compute the samples of a batch.
            has_context: the pipeline has named the branch (``cache_context``).
        """
        cache_dit = [("cache-dit", None)] * self._is_cache_dit  # no hook, and no row in CACHES
        for name, hook in (*self._hooks, *cache_dit):
            cache = CACHES.get(name, _Cache(by_branch=False))
            if getattr(getattr(hook, "config", None), "calibrate", False):
                raise UnsupportedAttentionError(
                    f"{self._name}: MagCache with calibrate=True measures the tokens of a shard: "
                    "calibrate on one process, and give its mag_ratios"
                )
            if splits_branches and not (cache.by_branch and has_context):
                raise UnsupportedAttentionError(
                    f"{self._name}: {name} counts the calls of both branches of the guidance, and "
                    "with cfg_degree each rank has those of one: use cfg_degree=1, or a cache with "
                    "a state for each cache_context (FirstBlockCache, MagCache, TaylorSeer) in a "
                    "pipeline that enters them"
                )
            if splits_samples and cache.whole_batch:
                raise UnsupportedAttentionError(
                    f"{self._name}: {name} takes half of the batch for a branch of the guidance, "
                    "and with cfg_degree a rank has samples of one branch: use cfg_degree=1"
                )

    def check_same_parts(self, divided_as_before: bool) -> None:
        """UnsupportedAttentionError if caches hold tokens of other shards than this pass has, as it
        is not ``divided_as_before``: over the same parts of the mesh as the pass before."""
        if not divided_as_before and any(_has_state(hook) for _, hook in self._hooks):
            raise UnsupportedAttentionError(
                f"{self._name}: guidance is on in some steps and off in others, which with "
                "cfg_degree other ranks compute, and a cache holds the tokens of the steps before: "
                "use cfg_degree=1, or disable_cache()"
            )

    def decide_on(self, mesh: SequenceMesh) -> None:
        """Let all ranks of a mesh decide together, until :meth:`release` at the pass's end."""
        for name, hook in self._hooks:
            if CACHES[name].by_residual:
                hook._should_compute_remaining_blocks = partial(_changed, hook, mesh)

    def release(self) -> None:
        for _, hook in self._hooks:
            vars(hook).pop("_should_compute_remaining_blocks", None)


@disable_in_compile("the ranks decide whether blocks are skipped")
def _changed(hook: Any, mesh: SequenceMesh, residual: Tensor) -> bool:
    # In place of the hook's own method, which is given the first block's residual, here a shard:
    # True computes the other blocks. The same means, of all ranks' tokens (collective): in fp64, so
    # that the order of sums makes no difference; then in the dtype in which diffusers divides.
    before = hook.state_manager.get_state().head_block_residual
    if before is None:
        return True
    sums = [x.abs().sum(dtype=torch.float64) for x in (residual - before, before)]
    numbers = (*torch.stack(sums).tolist(), float(residual.numel()))
    group = mesh.consistency.group
    if group is not None:
        mesh.agree("a cache decides whether a pass is computed")
        rank_bytes = all_gather_bytes(struct.pack("<3d", *numbers), group)
        numbers = tuple(map(sum, zip(*(struct.unpack("<3d", x) for x in rank_bytes), strict=True)))
    *both, count = numbers
    difference, norm = (torch.tensor(x / count, dtype=residual.dtype) for x in both)
    return float(difference / norm) > hook.threshold


def _settings(hook: Any) -> dict[str, Any]:
    config = getattr(hook, "config", None)
    values = {**vars(hook), **({} if config is None else vars(config))}
    plain = (bool, int, float, str, tuple)
    return {name: x for name, x in values.items() if isinstance(x, plain)}


def _has_state(hook: Any) -> bool:
    manager, state = getattr(hook, "state_manager", None), getattr(hook, "state", None)
    return bool(getattr(manager, "_state_cache", None) or getattr(state, "iteration", 0))
