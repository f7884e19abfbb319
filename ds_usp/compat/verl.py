"""verl's sequence parallelism as Ulysses x ring: a plug-in that verl loads by its entry points.

verl's FSDP engines shard packed samples over ``ulysses_sequence_parallel_size`` ranks, gather the
outputs, and put their Ulysses in the place of transformers' ``_flash_attention_forward``. An engine
whose config has a ``ring_degree`` gets :mod:`ds_usp.compat.flash_attention_forward` there instead,
over the same ranks. All else stays verl's.

Importing this module installs it, before or after verl: verl only loads what it finds. In each of
its processes its modules are changed as they are loaded; nothing of it, nor torch, is before.
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
from typing import TYPE_CHECKING, Any, Final

from ds_usp.errors import ConfigError, DataError, UnsupportedAttentionError
from ds_usp.geometry.degrees import Degrees

if TYPE_CHECKING:
    from ds_usp.compat.flash_attention_forward import FlashAttentionForward

_NAMES: Final = MappingProxyType({"sp": "ulysses_sequence_parallel_size", "ring": "ring_degree"})
_ATTENTION: Final = "_ulysses_flash_attention_forward"
_OURS: Final = "_ds_usp_attention"  # attribute of an engine
_SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ADVICE = "Leave ring_degree out: verl's own sequence parallelism, or none, is for this"


def _change_config(module: ModuleType) -> None:
    """Let the config of FSDP engines, which hydra makes of the command line, take ``ring_degree``
    and ``share_prefixes``."""
    config = module.FSDPEngineConfig
    init = config.__init__

    @wraps(init)
    def initialize(
        self: Any,
        *args: Any,
        ring_degree: int | None = None,
        share_prefixes: bool = False,
        **fields: Any,
    ) -> None:
        init(self, *args, **fields)
        self.ring_degree, self.share_prefixes = ring_degree, share_prefixes

    config.__init__ = initialize


def _change_engine(module: ModuleType) -> None:
    """Let an engine make a mesh over the ranks that share a sequence, collective over them, where
    verl makes its own, and its models compute attention over it."""
    from ds_usp.comm.mesh import SequenceMesh
    from ds_usp.compat import verl_trees
    from ds_usp.compat.flash_attention_forward import flash_attention_forward

    engine, verl_models = module.FSDPEngine, import_module("verl.models.transformers.monkey_patch")
    init_device_mesh, build_module = engine._init_device_mesh, engine._build_module
    verl_attention = getattr(verl_models, _ATTENTION)
    # transformers has one such function in a process, and an actor and its reference are two
    # engines of it, often over one group: the one whose context verl has entered decides.
    running: list[FlashAttentionForward | None] = []
    for context in (module.EngineTrainModeCtx, module.EngineEvalModeCtx):
        _follow(context, running)

    @wraps(verl_attention)
    def attention(*args: Any, **kwargs: Any) -> Any:
        ours = running[-1] if running else None
        if ours is None:
            return verl_attention(*args, **kwargs)
        if kwargs.get("position_ids") is None and kwargs.get("cu_seq_lens_q") is None:
            raise DataError(
                "a layer of this model hands neither position_ids nor cu_seq_lens_q to its "
                "attention, so it cannot know where packed samples begin: set "
                "ulysses_sequence_parallel_size=1 (verl's own would attend to each shard alone)"
            )
        return ours(*args, **kwargs)

    @wraps(init_device_mesh)
    def _init_device_mesh(self: Any) -> None:
        init_device_mesh(self)
        ring, sp = _ring_degree(self), self.ulysses_sequence_parallel_size
        if _shares_prefixes(self) and (ring is None or sp == 1):
            raise ConfigError(
                f"share_prefixes=True with ring_degree={ring}, {_NAMES['sp']}={sp}: it is ds_usp's "
                "attention that knows trees. Set ring_degree (1: Ulysses alone), and 2 ranks or "
                "more"
            )
        if ring is None:
            return
        _check_config(self.model_config.hf_config, self.engine_config.strategy, sp, ring)
        if sp > 1:
            mesh = SequenceMesh.from_group(self.ulysses_parallel_group, ulysses_degree=sp // ring)
            # verl hands down the positions of whole samples, also where each fills one shard.
            setattr(self, _OURS, flash_attention_forward(mesh, equal_documents=True))

    @wraps(build_module)
    def _build_module(self: Any) -> Any:
        sp = self.ulysses_sequence_parallel_size
        if _ring_degree(self) is None or sp == 1:
            return build_module(self)
        self.ulysses_sequence_parallel_size = 1  # by which verl would ask the heads to divide
        try:
            model = build_module(self)
        finally:
            self.ulysses_sequence_parallel_size = sp
        _check_model(model)
        return model

    verl_trees.change_engine(module, _attention_of_trees)
    setattr(verl_models, _ATTENTION, attention)
    engine._init_device_mesh, engine._build_module = _init_device_mesh, _build_module


def _follow(context: Any, running: list[FlashAttentionForward | None]) -> None:
    """Keep last in ``running`` the attention of the engine whose context is entered, or None."""
    enter, leave = context.__enter__, context.__exit__

    @wraps(enter)
    def enter_and_follow(self: Any) -> Any:
        entered = enter(self)
        running.append(getattr(self.engine, _OURS, None))
        return entered

    @wraps(leave)
    def leave_and_return(self: Any, *error: Any) -> Any:
        running.pop()
        return leave(self, *error)

    context.__enter__, context.__exit__ = enter_and_follow, leave_and_return


def _ring_degree(engine: Any) -> int | None:
    # Engines that inherit from that of FSDP have configs of their own.
    return getattr(engine.engine_config, "ring_degree", None)


def _shares_prefixes(engine: Any) -> bool:
    return bool(getattr(engine.engine_config, "share_prefixes", False))


def _attention_of_trees(engine: Any) -> Any:
    return getattr(engine, _OURS, None) if _shares_prefixes(engine) else None


def _check_config(config: Any, strategy: str, sp: int, ring: int) -> None:
    """Raise, before weights are loaded, if a model of this config is not served.

    Raises:
        ConfigError: degrees that fit neither each other nor the heads.
        UnsupportedAttentionError: verl shards this model, or with this strategy, in another way.
    """
    heads, kv_heads = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    Degrees(sp=sp, ring=ring, heads=heads, kv_heads=kv_heads).check(_NAMES)
    if sp == 1:  # nothing is shared
        return
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS)
    if strategy not in ("fsdp", "fsdp2"):
        reason = f"strategy={strategy} shards sequences in a way of its own"
    elif config.get_text_config() is not config:
        reason = "verl shards models of images and sounds inside, with attention of its own"
    elif others:
        reason = f"it has layers of kind {', '.join(others)}, and a ring serves attention"
    else:
        return
    raise UnsupportedAttentionError(f"ring_degree={ring}, {config.model_type}: {reason}. {_ADVICE}")


def _check_model(model: Any) -> None:
    """Raise if a layer would compute each rank's own tokens by themselves, which verl does not
    notice.

    Raises:
        ConfigError: another attention implementation than the one that verl replaces.
        UnsupportedAttentionError: layers with a state, or what else needs other ranks' tokens.
    """
    from ds_usp.compat.models_on_shards import ShardLimits

    utils = import_module("transformers.modeling_utils")
    flash = import_module("transformers.integrations.flash_attention")
    # A critic may be the model in a wrapper of TRL's.
    model = next(part for part in model.modules() if isinstance(part, utils.PreTrainedModel))
    name = model.config._attn_implementation
    if utils.ALL_ATTENTION_FUNCTIONS.get(name) is not flash.flash_attention_forward:
        raise ConfigError(
            f"attn_implementation={name} would attend to each rank's own tokens alone: verl "
            "replaces flash attention only. Use flash_attention_2, its default"
        )
    if reason := ShardLimits.of(model).reason:
        raise UnsupportedAttentionError(f"{type(model).__name__}: {reason}. {_ADVICE}")


_CHANGES: Final = MappingProxyType(
    {
        "verl.workers.config.engine": _change_config,
        "verl.workers.engine.fsdp.transformer_impl": _change_engine,
    }
)


# verl loads its plug-ins in the middle of its own import, in every process, the driver and rollout
# servers too. To import its engines there costs seconds and may need a GPU.
class _Changer(MetaPathFinder):
    """Finds the modules of ``_CHANGES`` where others find them, and changes them once loaded."""

    def __init__(self) -> None:
        self._asked_of_others: set[str] = set()  # names: threads may import several at once

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in _CHANGES or name in self._asked_of_others:
            return None
        self._asked_of_others.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._asked_of_others.discard(name)
        if spec is not None and spec.loader is not None:
            _change_when_loaded(spec.loader, _CHANGES[name])
        return spec


def _change_when_loaded(loader: Loader, change: Callable[[ModuleType], None]) -> None:
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        change(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


sys.meta_path.insert(0, _Changer())
for _name in _CHANGES.keys() & sys.modules.keys():
    _CHANGES[_name](sys.modules[_name])
