"""verl's sequence parallelism as Ulysses x ring: a plug-in that verl finds by its entry points.

verl shards the packed tokens of its FSDP engines and gathers their log-probs itself, and replaces
transformers' ``_flash_attention_forward`` by its Ulysses. An engine whose config has a
``ring_degree`` gets :func:`ds_usp.compat.flash_attention_forward.flash_attention_forward` there
instead; all else stays verl's, and an engine without one is verl's altogether.

    actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=8
    +actor_rollout_ref.actor.fsdp_config.ring_degree=2                      Ulysses 4 x ring 2
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any, Final

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.compat.flash_attention_forward import FlashAttentionForward, flash_attention_forward
from ds_usp.errors import ConfigError, DataError, UnsupportedAttentionError
from ds_usp.geometry.degrees import Degrees

_NAMES: Final = MappingProxyType({"sp": "ulysses_sequence_parallel_size"})
_ATTENTION = "_ulysses_flash_attention_forward"
_SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})


def install() -> None:
    """Let verl's FSDP engines take a ``ring_degree``, in this process; again does nothing.

    verl's modules are changed as they are loaded: verl loads its plug-ins in the middle of its own
    ``__init__``, in every process, those of the driver and of rollouts too.
    """
    if any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _WhenLoaded())
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])


class _WhenLoaded(MetaPathFinder):
    """Finds the modules of :data:`_CHANGES` as others do, and changes them once they are loaded."""

    def __init__(self) -> None:
        self._asks_others = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in _CHANGES or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = find_spec(name)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            _then(spec.loader, _CHANGES[name])
        return spec


def _then(loader: Loader, change: Callable[[ModuleType], None]) -> None:
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        change(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _change_config(module: ModuleType) -> None:
    """``ring_degree``, an argument of the config of FSDP engines: hydra makes it from the command
    line and verl passes it to workers, pickled. Without the plug-in it is refused as unknown."""
    config = module.FSDPEngineConfig
    init = config.__init__

    @wraps(init)
    def __init__(self: Any, *args: Any, ring_degree: int | None = None, **fields: Any) -> None:
        init(self, *args, **fields)
        self.ring_degree = ring_degree

    config.__init__ = __init__


def _change_engine(module: ModuleType) -> None:
    """A mesh over verl's groups of ranks that share tokens, and our attention in these groups."""
    engine, ulysses = module.FSDPEngine, import_module("verl.utils.ulysses")
    monkey_patch = import_module("verl.models.transformers.monkey_patch")
    init_device_mesh, build_module = engine._init_device_mesh, engine._build_module
    own_attention = getattr(monkey_patch, _ATTENTION)
    # An actor and its reference are engines of one process with one function of transformers, so
    # the group that verl has set for the engine that runs decides, as in verl's own function.
    attention_of: dict[Any, FlashAttentionForward] = {}

    @wraps(own_attention)
    def attention(*args: Any, **kwargs: Any) -> Any:
        ours = attention_of.get(ulysses.get_ulysses_sequence_parallel_group())
        if ours is None:
            return own_attention(*args, **kwargs)
        if kwargs.get("position_ids") is None and kwargs.get("cu_seq_lens_q") is None:
            raise DataError(
                "a layer gives its attention neither position_ids nor cu_seq_lens_q, which say "
                "where the packed samples begin: with this model leave ring_degree out and set "
                "ulysses_sequence_parallel_size=1"
            )
        return ours(*args, **kwargs)

    @wraps(init_device_mesh)
    def _init_device_mesh(self: Any) -> None:
        init_device_mesh(self)
        ring, sp = _ring_degree(self), self.ulysses_sequence_parallel_size
        if ring is None:
            return
        _check_config(self.model_config.hf_config, self.engine_config.strategy, sp, ring)
        if sp > 1:
            group = self.ulysses_parallel_group
            mesh = SequenceMesh.from_group(group, ulysses_degree=sp // ring)
            attention_of[group] = flash_attention_forward(mesh, equal_documents=True)

    @wraps(build_module)
    def _build_module(self: Any) -> Any:
        sp = self.ulysses_sequence_parallel_size
        if _ring_degree(self) is None or sp == 1:
            return build_module(self)
        self.ulysses_sequence_parallel_size = 1  # heads need not divide sp, which verl asks for
        try:
            model = build_module(self)
        finally:
            self.ulysses_sequence_parallel_size = sp
        _check_model(model)
        return model

    setattr(monkey_patch, _ATTENTION, attention)
    engine._init_device_mesh, engine._build_module = _init_device_mesh, _build_module


def _ring_degree(engine: Any) -> int | None:
    # Engines that inherit from that of FSDP have configs of their own.
    return getattr(engine.engine_config, "ring_degree", None)


def _check_config(model: Any, strategy: str, sp: int, ring: int) -> None:
    """Raise, before weights are loaded, if a model of this config is not served.

    Raises:
        ConfigError: degrees that do not fit each other or the heads.
        UnsupportedAttentionError: verl shards this model, or this strategy, in another way.
    """
    heads, kv_heads = (
        getattr(model, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    Degrees(sp=sp, ring=ring, heads=heads, kv_heads=kv_heads).check(_NAMES)
    if sp == 1:
        return
    others = sorted(set(getattr(model, "layer_types", None) or ()) - _SERVED_LAYERS)
    reason = ""
    if strategy not in ("fsdp", "fsdp2"):
        reason = f"strategy {strategy} shards sequences itself. Use fsdp2"
    elif model.get_text_config() is not model:
        reason = "of models of images or sounds verl shards the text model, with attention of its own"
    elif others:
        reason = f"layers of kind {', '.join(others)} are no attention that a ring shares"
    if reason:
        raise UnsupportedAttentionError(
            f"ring_degree={ring} for {model.model_type}: {reason}. Leave ring_degree out"
        )


def _check_model(model: Any) -> None:
    """Raise if layers of the model would not get all tokens from what verl has replaced.

    Raises:
        ConfigError: another attention implementation.
        UnsupportedAttentionError: layers with a state.
    """
    utils = import_module("transformers.modeling_utils")
    flash = import_module("transformers.integrations.flash_attention")
    model = next(m for m in model.modules() if isinstance(m, utils.PreTrainedModel))
    name = model.config._attn_implementation
    if utils.ALL_ATTENTION_FUNCTIONS.get(name) is not flash.flash_attention_forward:
        raise ConfigError(
            f"attn_implementation={name} computes each rank's own tokens alone: with sequence "
            "parallelism verl shares flash attention only. Set "
            "+model.override_config.attn_implementation=flash_attention_2"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedAttentionError(
            f"{type(model).__name__} has layers that carry a state from token to token, which no "
            "ring of attention shares: set ulysses_sequence_parallel_size=1"
        )


_CHANGES: Final = MappingProxyType(
    {
        "verl.workers.config.engine": _change_config,
        "verl.workers.engine.fsdp.transformer_impl": _change_engine,
    }
)
