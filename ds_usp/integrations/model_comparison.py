"""The model that each rank of a mesh holds, compared with the others': ``enable`` calls ``begin``,
``replicas.same_on_all_ranks`` in each pass ``of_pass``, ``agree`` and ``end_pass``. What says that
it is collective communicates; the rest reads this rank's model."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ds_usp.comm.call_record import CallRecord, Signature, mismatch_error
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.comm.readings import version_of
from ds_usp.errors import MeshError
from ds_usp.integrations.digests import ArgumentsDigest, digest_of_bits, flat

# Note [what is equal on the ranks of a mesh]
#
# Each rank computes its tokens with its own copy of the model, so a copy that differs gives every
# rank the same wrong loss or picture: a checkpoint, adapter or scale that one rank alone has
# loaded, or a configuration file of another version. Two things are compared:
#
# All settings (`_settings`), which takes milliseconds and waits for GPUs: by `enable`, by
# `SequenceMesh.check`, in the first forward pass, and in one that finds on this rank that some were
# changed: modules, their classes, hooks and methods, values of the configuration, buffers that are
# not saved and tensors that are plain attributes (`_outline`), shapes of weights. A change on one
# rank gives it another digest. Of a function its name is compared alone.
#
# In each pass (`of_pass`), about a microsecond a module and weight: modes, adapters, and which
# weights were written, moved or replaced since the pass before, all of their elements if those are
# few; and a few of each weight, others in each pass: `weight.data.mul_()` leaves no other trace.
#
# Training changes all weights in each step, equally on all ranks, to the bit: all-reduces and
# all-gathers give every rank the same sums. Of weights that FSDP, ZeRO-3 or tensor parallelism
# shards, ranks hold different parts: nothing of them is compared.
#
# A version shows that a weight was written, not what: one rank may have swapped weights and swapped
# them back. So when ranks differ, and all of them are in this comparison, they exchange what they
# hold. The error names the first difference; where there is none, the pass goes on.
#
# Between passes modules are kept, but no weights: those that were moved or replaced are freed.
_ELEMENTS = 8  # of each weight: another seed or checkpoint changes nearly all of them
_IN_A_PASS = 128  # weights; those of larger models take turns, so that a pass costs no more
_FEW = 2**20  # elements of changed weights that a pass compares wholly
_FALSE_ALARMS = 3  # then versions are left out: something writes otherwise on each rank
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_ALL_MODULES = ("_global_forward_pre_hooks", "_global_forward_hooks")
# Modules whose hooks count and log, and change nothing: they are often on rank 0 alone, as those of
# wandb.watch, FlopCounterMode, DeepSpeed's flops profiler and torch's trackers of memory.
_OBSERVERS = (
    "wandb",
    "deepspeed.profiling",
    "torch.utils.flop_counter",
    "torch.utils.module_tracker",
    "torch.distributed._tools",
    "torch.distributed.tensor.debug",
)
# Words in names of attributes and buffers that may differ between ranks, or make no difference.
_NO_SETTINGS = frozenset(
    {
        *("rank", "device", "devices", "path", "dir", "file", "version", "warnings", "issued"),
        *("cache", "cached", "checkpointing", "architectures", "dtype", "features"),
        *("verbose", "debug", "logging", "main"),
    }
)
# Words in names of tensors that passes leave in attributes, as those of generation do.
_STATES = frozenset({"deltas", "state", "states", "codes", "last"})
# What PEFT changes in its layers.
_OF_ADAPTERS = ("scaling", "merged_adapters", "_active_adapter", "_disable_adapters")
_TO_LOAD = (
    "Load checkpoints and adapters on every rank of the mesh, between the same two passes, or set "
    "one seed before the model is made. DistributedDataParallel and deepspeed.initialize broadcast "
    "rank 0's weights; without them: for x in (*model.parameters(), *model.buffers()): "
    "torch.distributed.broadcast(x.data, group=mesh.sp_group, group_src=0)"
)
_TO_SET = (
    "Give every rank of the mesh the same configuration, modules, hooks, adapters and scales, and "
    "change them on every rank, between the same two passes; broadcast buffers that no checkpoint "
    "holds, as inv_freq. What a module counts for itself, and may be another number on each rank, "
    "is not compared under a name that begins with _"
)
_OF_A_SET = (
    "{path} has the same {count} values on all ranks, in another order: where it is the list of a "
    "set (as layer_types of Cohere Compass), start each rank with PYTHONHASHSEED=0, or set {path} "
    "on every rank, as to sorted({path}), before enable. "
)
_TO_VOUCH = (
    ". A hook that changes nothing and calls no collective, as one that logs, may be on one rank "
    "alone: set hook.ds_usp_observes = True on its function before it is registered"
)
Entries = dict[str, list[str]]  # what is compared of a setting or a weight, by its name


class ModelComparison:
    """Compares one model with its copies on the other ranks of a mesh.

    Args:
        model: whose weights and settings they are; those of its ``config`` too, if it has one.
    """

    def __init__(self, mesh: SequenceMesh, model: nn.Module) -> None:
        self._mesh, self._model = mesh, model
        self._modules: dict[str, nn.Module] = {}
        self._structure: list[Any] = []  # modules' classes and children, names of tensors
        self._attributes: list[dict[str, Any]] = []  # modules' attributes
        self._hooks: list[dict[int, Any]] = []  # of each module four kinds
        # A module's attributes when first seen, and if tensors: frameworks add counts and times.
        self._first_settings: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()
        self._digest = ""  # of settings, when they were last read
        self._last_outline: list[Any] = []  # when settings were last read
        self._methods: list[tuple[dict[str, Any], str]] = []  # attributes that are callable
        self._unsaved: list[tuple[dict[str, Any], str]] = []  # tensors that are settings
        self._before_first_pass: Entries | None = None
        self._written_by_passes: set[str] | None = None  # settings; None before the first one
        self._modes = 0  # a checksum: train or eval, trained weights, torch's modes, adapters
        self._dropouts: list[_DropoutNd] = []
        self._slots: list[tuple[dict[str, Any], str, str, str]] = []  # of weights, and their names
        self._trained: list[bool] = []  # of all weights
        self._identities: list[int] = []  # of all weights
        self._shapes: list[str] = []
        self._whole: list[int] = []  # slots of weights that this rank holds whole
        self._marks: list[tuple[int, ...]] = []  # of whole weights: identity, address, version
        self._last_marks: list[tuple[int, ...]] = []  # in the last pass that no rank has refused
        self._changed: list[str] = []  # names
        self._turn = self._false_alarms = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelComparison:
        return ModelComparison(self._mesh, deepcopy(self._model, memo))

    def begin(self, subject: str, text: str) -> None:
        """Compare a text (options) and the model's settings; weights and train or eval mode not,
        which may be loaded and set later. ``SequenceMesh.check`` compares the model from now on.
        Collective over the mesh.

        Raises:
            MeshError: they differ; it names the first setting that does.
        """
        if self._mesh.sp_group is None:
            return
        self._read()
        settings = _digest(self._settings(modes=False))
        self.agree(subject, text, f"settings {settings}", weights=False)
        models = self._mesh.checks.setdefault("models", _ModelsOfMesh())
        if all(reference() is not self for reference in models):
            models.append(ref(self))

    def leave(self) -> None:
        """``SequenceMesh.check`` no longer compares the model."""
        models = self._mesh.checks.get("models", [])
        models[:] = [reference for reference in models if reference() is not self]

    @torch.no_grad()
    def of_pass(self, everything: bool = False) -> dict[str, Any]:
        """Read what the ranks are to compare, as an ``ArgumentsDigest``, in the pass that begins.

        Args:
            everything: all settings, and elements of all weights, not only of those in turn.
        """
        weights, is_first = self._read(), self._written_by_passes is None
        if everything or is_first or not self._digest or self._is_outline_changed():
            settings = self._settings()
            self._digest = self._digest_of(settings)
            self._before_first_pass = settings if is_first else None
            self._last_outline = [
                {k: deepcopy(v) if type(v) in (list, dict) else v for k, v in x.items()}
                if type(x) is dict
                else x
                for x in self._outline()
            ]
        unchanged = [
            mark == last for mark, last in zip(self._marks, self._last_marks, strict=False)
        ]
        changed = [
            i for i in range(len(weights)) if len(unchanged) < len(weights) or not unchanged[i]
        ]
        self._changed = [self._name(i) for i in changed]
        turns = 1 if everything or not self._turn else max(1, -(-len(weights) // _IN_A_PASS))
        compared = {
            "settings": self._digest,
            "modes and adapters": self._modes,
            "turn": self._turn,
            f"{_ELEMENTS} elements of weights": _by_dtype(
                _sample(x, self._turn) for x in weights[self._turn % turns :: turns]
            ),
        }
        if self._false_alarms < _FALSE_ALARMS:
            compared["changed weights"] = f"{len(changed)} {_digest(self._changed)}"
            if sum(weights[i].numel() for i in changed) <= _FEW:
                compared["their elements"] = _by_dtype(weights[i].reshape(-1) for i in changed)
        return compared

    @property
    def structure(self) -> list[Any]:
        """Another list when a pass has found other modules than the pass before."""
        return self._structure

    @property
    def drops(self) -> bool:
        """A module drops elements in the pass that runs, whether or not it is given any here."""
        return any(x.training and x.p for x in self._dropouts)

    def state(self) -> object:
        """Equal as long as no setting is changed, and no weight written, moved or replaced."""
        self._read()
        attributes = [list(vars(module).values()) for module in self._modules.values()]
        return attributes, self._modes, self._marks

    def end_pass(self) -> None:
        """Remember what :meth:`of_pass` has read, after a comparison that no rank has refused."""
        self._last_marks, self._turn = self._marks, self._turn + 1

    def end_of_forward(self) -> None:
        """Leave out of later comparisons what the first forward pass has written itself, as a
        count, which may be a shard's."""
        before, self._before_first_pass = self._before_first_pass, None
        if before is not None and self._mesh.sp_group is not None:
            now = self._settings()
            names = before.keys() | now.keys()
            self._written_by_passes = {x for x in names if now.get(x) != before.get(x)}
            self._digest = self._digest_of(now)

    def agree(
        self, subject: str, text: str, model_text: str, advice: str = "", weights: bool = True
    ) -> None:
        """Compare two texts, of a call and of the model; where one differs, look for the reason in
        the model: with ``weights`` in these and modes too. Collective over the mesh.

        Raises:
            MeshError: they differ. If models do, it names the first setting or weight; else it ends
                with the advice.
        """
        prefix = f"{subject} (the model: "
        try:
            self._mesh.agree(f"{prefix}{model_text}), {text}")
        except MeshError as different:
            # Only where each rank has posted this are all of them here, and none waits elsewhere.
            posted = different.signatures
            if not posted or not all(x.startswith(prefix) for x in posted):
                raise
            worse = self.difference(weights)
            if worse is not None:
                raise worse from None
            try:
                self._mesh.agree(f"{subject} {text}")
            except MeshError as other:
                message = "\n".join(filter(None, (str(other), advice)))
                raise MeshError(message, other.signatures, other.layouts) from None

    def difference(self, weights: bool = True) -> MeshError | None:
        """The first setting that differs, or with ``weights`` mode or weight; None if none does.
        Collective over the mesh: every rank comes to the same result."""
        # A rank without memory for a digest must not leave the others waiting for its own.
        with self._mesh.agreeing("what models hold"):
            whole, settings = self._read(), self._settings(weights)
            shapes = zip(self._slots, self._shapes, strict=True)
            texts = {slot[-1]: [shape] for slot, shape in shapes if weights}
            for i, x in enumerate(whole if weights else ()):
                texts[self._name(i)].append(digest_of_bits(x))
        local_values = {
            "settings": settings,
            "weights": texts,
            "changed": self._changed if weights else [],
            "turn": self._turn,
            "written": sorted(self._written_by_passes or ()),
        }
        ranks = gathered_values(self._mesh, local_values)
        # What a pass has written on one rank may have had that value on another.
        written = {name for each in ranks for name in each["written"]}
        for name in written:
            for each in ranks:
                each["settings"].pop(name, None)
        error = None
        for kind, advice in (("settings", _TO_SET), ("weights", _TO_LOAD)):
            error = error or _first_difference([each[kind] for each in ranks], kind, advice)
        if error is None and weights:
            self._false_alarms += any(each["changed"] != local_values["changed"] for each in ranks)
            self._turn = max(each["turn"] for each in ranks)
            if self._written_by_passes is not None:
                self._written_by_passes = written
            self._digest = self._digest_of(settings)
        return error

    def _settings(self, modes: bool = True) -> Entries:
        """Return all settings by name (Note [what is equal on the ranks of a mesh]).

        Args:
            modes: train or eval mode, which weights are trained, and modes of torch too.
        """
        config: Any = getattr(self._model, "config", None)
        values = config.to_dict() if hasattr(config, "to_dict") else config
        entries = _leaves("config", values) if isinstance(values, Mapping) else {}
        for hooks in _OF_ALL_MODULES:
            entries |= _hooks(hooks, getattr(nn.modules.module, hooks))
        self._methods, self._unsaved = [], []
        for path, module in self._modules.items():
            entries |= self._settings_of(path, module, modes)
        if modes:
            entries |= {name: [str(x)] for name, x in _torch_modes().items()}
            for slot, trained in zip(self._slots, self._trained, strict=True):
                entries[f"{slot[-1]}.requires_grad"] = [str(trained)]
        return entries

    def _settings_of(self, path: str, module: nn.Module, modes: bool) -> Entries:
        """Return the settings of the module at ``path``; notes its methods and unsaved tensors."""
        dot, values = f"{path}." if path else "", vars(module)
        entries = {path or "model": [_class_of(module)]}
        for hooks in filter(values.get, _HOOKS):
            entries |= _hooks(dot + hooks[1:], values[hooks])
        if (first := self._first_settings.get(module)) is None:
            settings = {x: values[x] for x in values if _is_setting(x) and _leaves(x, values[x])}
            first = {x: isinstance(value, Tensor) for x, value in settings.items()}
            self._first_settings[module] = first
        methods = {x for x in values if callable(values[x]) and _is_setting(x)}
        self._methods += ((values, x) for x in methods)
        names = values.keys() & {*first, *_OF_ADAPTERS, *methods}
        buffers = filter(_is_setting, module._non_persistent_buffers_set)
        tensors: list[tuple[dict[str, Any], str]] = [(module._buffers, x) for x in sorted(buffers)]
        for name in sorted(names if modes else names - {"training"}):
            value = values[name]
            if not isinstance(value, Tensor):
                # None is as if it were absent: a number on another rank differs from it.
                entries |= {} if value is None else _leaves(dot + name, value)
            # What is None may be a tensor later, and was one before where passes leave states.
            elif first.get(name) and _STATES.isdisjoint(name.split("_")):
                tensors.append((values, name))
        written = self._written_by_passes or ()
        for holder, name in tensors:
            x: Any = holder.get(name)
            if _is_whole(x):
                entries[dot + name] = [_shape(x), digest_of_bits(x)]
                if dot + name not in written:
                    self._unsaved.append((holder, name))
        return entries

    def _outline(self) -> list[Any]:
        """Return what shows a change of settings, but of attributes' values."""
        config: Any = getattr(self._model, "config", None)
        values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        inner = [vars(x) for x in values.values() if hasattr(x, "to_dict")]
        return [
            [tuple(hooks) for hooks in filter(None, self._hooks)],
            [tuple(getattr(nn.modules.module, hooks)) for hooks in _OF_ALL_MODULES],
            list(map(len, self._attributes)),
            [id(values.get(name)) for values, name in self._methods],
            [_mark(values.get(name)) for values, name in self._unsaved],
            *map(dict, (values, *inner)),
        ]

    def _is_outline_changed(self) -> bool:
        try:
            return self._outline() != self._last_outline
        except (RuntimeError, ValueError):  # a tensor or an array in a configuration
            return True

    def _digest_of(self, settings: Entries) -> str:
        written = self._written_by_passes or ()
        compared = {x: text for x, text in settings.items() if x not in written}
        return _digest({**compared, "shapes of weights": self._shapes})

    def _name(self, i: int) -> str:
        return self._slots[self._whole[i]][-1]

    def _read(self) -> list[Tensor]:
        """Return the weights that this rank holds whole, in the order of ``_whole``; notes modules,
        modes and marks, and forgets ``_digest`` where modules or shapes have changed."""
        if self._structure != self._structure_now():
            self._modules = dict(self._model.named_modules())
            self._attributes = list(map(vars, self._modules.values()))
            self._dropouts = [x for x in self._modules.values() if isinstance(x, _DropoutNd)]
            self._hooks = [x[kind] for x in self._attributes for kind in _HOOKS]
            self._structure, self._digest, self._identities = self._structure_now(), "", []
            self._slots = [
                (vars(module), kind, key, f"{path}.{key}".removeprefix("."))
                for path, module in self._modules.items()
                for kind in ("_parameters", "_buffers")
                for key in vars(module)[kind]
                if key not in module._non_persistent_buffers_set
            ]
        dicts = self._attributes
        adapters = [[x.get(y) for y in _OF_ADAPTERS] for x in dicts if "_disable_adapters" in x]
        weights = [values[kind][key] for values, kind, key, _ in self._slots]
        self._trained = [x is not None and x.requires_grad for x in weights]
        modes = bytes(x["training"] for x in dicts), bytes(self._trained), _torch_modes(), adapters
        self._modes = zlib.crc32(repr(modes).encode())
        identities, addresses = list(map(id, weights)), list[int]()
        if identities == self._identities:  # else slots may be others'
            addresses = [weights[i].data_ptr() for i in self._whole]
        if not addresses or addresses != [address for _, address, _ in self._marks]:
            firsts = {id(x): i for i, x in reversed(list(enumerate(weights)))}
            self._whole = [i for i, x in enumerate(weights) if firsts[id(x)] == i and _is_whole(x)]
            whole = set(self._whole)
            shapes = [_shape(x) if i in whole else "in parts" for i, x in enumerate(weights)]
            self._digest = self._digest if shapes == self._shapes else ""
            self._identities, self._shapes = identities, shapes
            addresses = [weights[i].data_ptr() for i in self._whole]
        whole_weights = [weights[i] for i in self._whole]
        versions = [0 if x.is_inference() else x._version for x in whole_weights]
        self._marks = list(zip(map(id, whole_weights), addresses, versions, strict=True))
        return whole_weights

    def _structure_now(self) -> list[list[Any]]:
        dicts = self._attributes
        return [
            list(map(type, self._modules.values())),
            [child for x in dicts for child in x["_modules"].values()],
            [key for x in dicts for key in chain(x["_parameters"], x["_buffers"])],
        ]


def _sample(x: Tensor, turn: int) -> Tensor:
    """Evenly spaced elements, ``[min(8, n)]``, others in each turn; in turn 0 with the last one,
    where a table that was enlarged has its new ones, whatever strides a weight has."""
    count, spacing = min(_ELEMENTS, x.numel()), max(1, x.numel() // _ELEMENTS)
    shift = (turn * 0x9E3779B97F4A7C15 % 2**64 >> 32) % spacing
    first = x.numel() - 1 - (count - 1) * spacing - shift
    if x.is_contiguous():  # a view takes a microsecond
        return x.as_strided((count,), (spacing,), x.storage_offset() + first)
    indices = torch.arange(count) * spacing + first
    return x[torch.unravel_index(indices.to(x.device), x.shape)]


def _mark(x: Any) -> tuple[int, ...] | None:
    if not isinstance(x, Tensor):
        return None
    return id(x), x.data_ptr(), version_of(x)


def _torch_modes() -> dict[str, object]:
    """Settings of the process that change what it computes."""
    matmul: Any = torch.backends.cuda.matmul
    # Newer torch refuses to say the old name where the new one was set.
    precision = getattr(matmul, "fp32_precision", None) or torch.get_float32_matmul_precision()
    precision = "ieee" if precision in ("none", "highest") else precision
    modes = {"torch.get_default_dtype()": torch.get_default_dtype(), "fp32 matmuls": precision}
    for kind in ("cpu", "cuda"):
        enabled = torch.is_autocast_enabled(kind)
        modes[f"autocast of {kind}"] = torch.get_autocast_dtype(kind) if enabled else "off"
    return modes


def _shape(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _is_whole(weight: Any) -> bool:
    # Of weights that FSDP, ZeRO-3 or tensor parallelism shards, and of DeepSpeed's experts, ranks
    # hold different parts; of other tensor classes and those without values nothing can be read.
    if weight is None or hasattr(weight, "ds_id") or hasattr(weight, "_fsdp_flattened"):
        return False
    if not getattr(weight, "allreduce", True):  # as DeepSpeed marks experts
        return False
    plain = type(weight.data) is Tensor and not nn.parameter.is_lazy(weight)
    readable = plain and weight.layout is torch.strided and weight.device.type != "meta"
    return readable and weight.numel() > 0 and weight.data_ptr() != 0


@lru_cache(maxsize=4096)
def _is_setting(name: str) -> bool:
    return name[:1] != "_" and _NO_SETTINGS.isdisjoint(name.lower().split("_"))


def _class_of(module: nn.Module) -> str:
    """The name of its class, and that of a ``forward`` which somebody has put into the class."""
    kind = type(module)
    forward: Any = getattr(kind.forward, "__qualname__", "a function without a name")
    inherited = any(forward == f"{x.__qualname__}.forward" for x in kind.__mro__)
    inherited = inherited or kind.forward is nn.Module.forward
    return kind.__name__ if inherited else f"{kind.__name__} with {forward}"


def _leaves(name: str, value: Any) -> Entries:
    """Plain values, names of functions, and digests of tensors that are not trained, in a value and
    the mappings and lists in it."""
    entries = {}
    for path, x in flat(name, value):
        if isinstance(x, Tensor):
            if _is_whole(x) and not x.requires_grad:
                entries[path] = [_shape(x), digest_of_bits(x)]
            continue
        if isinstance(x, float) and x.is_integer():  # files hold 1 or 1.0
            x = int(x)
        if callable(x):
            x = getattr(x, "__qualname__", type(x).__name__)
        # Text with a slash is a path, which a node may have for itself.
        plain = isinstance(x, (int, float, type(None))) or (isinstance(x, str) and "/" not in x)
        if plain and all(map(_is_setting, path.removeprefix(name).split(".")[1:])):
            entries[path] = [str(x)]
    return entries


def is_observer(hook: Any) -> bool:
    """Whether a hook changes nothing: it is of a library that counts or logs, or has the attribute
    ``ds_usp_observes``, by which its author vouches for it."""
    while isinstance(hook, partial):
        hook = hook.func
    module = f"{getattr(hook, '__module__', '')}."  # a dot: wandb is no prefix of wandb_x
    return getattr(hook, "ds_usp_observes", False) is True or any(
        module.startswith(f"{name}.") for name in _OBSERVERS
    )


def _hooks(name: str, hooks: Mapping[int, Any]) -> Entries:
    return _leaves(name, [hook for hook in hooks.values() if not is_observer(hook)])


def _digest(value: object) -> str:
    # By name: a dict that is filled from a set has another order on each rank.
    value = sorted(value.items()) if isinstance(value, dict) else value
    return blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _by_dtype(rows: Iterable[Tensor]) -> dict[str, Tensor]:
    """Join 1-D rows of each dtype; on the CPU if they are on several devices (some offloaded)."""
    by_dtype: dict[str, list[Tensor]] = {}
    for row in rows:
        by_dtype.setdefault(str(row.dtype).removeprefix("torch."), []).append(row)
    return {
        dtype: torch.cat(each if len({x.device for x in each}) == 1 else [x.cpu() for x in each])
        for dtype, each in by_dtype.items()
    }


def gathered_values(mesh: SequenceMesh, value: Any) -> list[Any]:
    """Every rank's value, in their order, of what JSON keeps. Collective over the mesh."""
    data, group = json.dumps(value).encode(), mesh.consistency.group
    if group is None:
        return [value]
    lengths = all_gather_bytes(len(data).to_bytes(8, "little"), group)
    longest = max(int.from_bytes(x, "little") for x in lengths)
    return [json.loads(x) for x in all_gather_bytes(data.ljust(longest), group)]


def _first_difference(ranks: list[Entries], kind: str, advice: str) -> MeshError | None:
    """Return the error that names the first entry in which ranks differ, None where none does;
    ``kind`` of entries: "settings" or "weights"."""
    names = dict.fromkeys(name for each in ranks for name in each)
    differ = [x for x in names if any(each.get(x) != ranks[0].get(x) for each in ranks)]
    if not differ:
        return None
    texts = [each.get(differ[0], ["absent"]) for each in ranks]
    path, _, index = differ[0].rpartition(".")
    lists = [[each[x] for x in each if x.rpartition(".")[0] == path] for each in ranks]
    if index.isdigit() and all(sorted(x) == sorted(lists[0]) for x in lists):
        advice = _OF_A_SET.format(path=path, count=len(lists[0])) + advice
    columns = zip_longest(*texts, fillvalue="absent")
    values = next(column for column in columns if len(set(column)) > 1)
    records = [CallRecord(Signature((f"{differ[0]}: {value}",))) for value in values]
    error = mismatch_error(records)
    advice += _TO_VOUCH if "hooks." in differ[0] else ""
    message = f"{error}\n{len(differ)} of {len(names)} {kind} of the model differ. {advice}"
    return MeshError(message, error.signatures)


class _ModelsOfMesh(list["ref[ModelComparison]"]):
    """The enabled models that ``SequenceMesh.check`` compares, by calling this; collective."""

    def __call__(self, mesh: SequenceMesh) -> None:
        # One that was dropped may still be there on some ranks, until its memory is collected.
        models = {str(i): model for i, weak in enumerate(self) if (model := weak()) is not None}
        # A rank without memory for its samples must not leave the others waiting for them.
        with mesh.agreeing("a check of the models"):
            digests = {x: ArgumentsDigest(y.of_pass(True)).text() for x, y in models.items()}
        ranks = gathered_values(mesh, digests)
        for number, model in models.items():
            texts = {each.get(number) for each in ranks}
            error = model.difference() if len(texts) > 1 and None not in texts else None
            if error is not None:
                raise error
