"""The model that each rank of a mesh holds, compared with the others' in each forward pass."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from hashlib import blake2b
from itertools import chain, zip_longest
from operator import itemgetter
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from ds_usp.comm.call_record import CallRecord, Signature, mismatch_error
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import MeshError

# Note [what the ranks of a mesh hold alike]
#
# Each rank computes its tokens with its own copy of the model, so a copy that differs gives every
# rank the same wrong loss or picture: a checkpoint, adapter, scale or average that one rank alone
# has loaded, or a configuration file of another version. So `enable` compares configurations, and
# each forward pass, besides its arguments,
#
# - settings: of each module its class and its plain attributes (eps, p, scaling, active and merged
#   adapters, train or eval mode), with shapes and dtypes of the weights;
# - which weights have changed since the pass before, by identity, address and version, with all of
#   their elements if those are few: a change in place on one rank shows, however small it is;
# - a few elements of each weight, others in each pass: `weight.data.mul_()` leaves no other trace.
#
# Training changes all weights in each step, alike on all ranks, to the bit: all-reduces and
# all-gathers give every rank the same sums. Of weights that FSDP, ZeRO-3 or tensor parallelism
# shards, ranks hold different parts: nothing of them is compared.
#
# A version tells that a weight was written, not what: one rank may have swapped weights and swapped
# them back. So when ranks differ, and all of them are in this comparison, they exchange what they
# hold. The error names the first difference; where there is none, the pass goes on.
#
# Between passes modules are kept, but no weights: those that were moved or replaced are freed.
_ELEMENTS = 8  # of each weight: another seed or checkpoint changes nearly all of them
_IN_A_PASS = 128  # weights; those of larger models take turns, so that a pass costs no more
_FEW = 2**20  # elements of changed weights that a pass compares wholly
_CHUNK = 2**22  # elements
_FALSE_ALARMS = 3  # then versions are left out: something writes otherwise on each rank
_WATCHED_PASSES = 4  # the first ones, after which settings that passes write are known
_MANY = 64  # entries of a list or mapping that is no setting
# Words in names of attributes that may differ between ranks, or make no difference to a pass.
_NO_SETTINGS = frozenset(
    {
        *("rank", "device", "devices", "path", "dir", "file", "version", "warnings", "issued"),
        *("cache", "checkpointing", "architectures", "dtype", "features"),
        *("verbose", "debug", "logging", "main"),
    }
)
# What PEFT changes in its layers. Lists and mappings of other modules are read once.
_OF_ADAPTERS = frozenset({"scaling", "merged_adapters", "_active_adapter", "_disable_adapters"})
_TO_LOAD = (
    "Load checkpoints and adapters on every rank of the mesh, between the same two passes, or seed "
    "alike before the model is made. DistributedDataParallel and deepspeed.initialize broadcast "
    "rank 0's weights; by hand: for x in (*model.parameters(), *model.buffers()): "
    "torch.distributed.broadcast(x.data, group=mesh.sp_group, group_src=0)"
)
_TO_SET = (
    "Give every rank of the mesh the same configuration, modules, adapters and scales, and change "
    "them on every rank, between the same two passes. What a module counts for itself, and may be "
    "another number on each rank, is not compared under a name that begins with _"
)
Entries = dict[str, list[str]]  # what is compared of a setting or a weight, by its name


class ModelComparison:
    """The model that each rank of a mesh holds, compared with the others'.

    Args:
        model: whose weights and settings they are; those of its ``config`` too, if it has one.
    """

    def __init__(self, mesh: SequenceMesh, model: nn.Module) -> None:
        self._mesh, self._model = mesh, model
        self._configs: list[tuple[str, Any]] = []
        self._attributes: list[dict[str, Any]] = []  # of configurations and modules
        self._children_of: list[dict[str, nn.Module | None]] = []
        self._children: list[nn.Module | None] = []
        self._tensors_of: list[dict[str, Any]] = []
        self._keys: list[str] = []  # of all parameters and buffers, by their modules
        self._names: list[str | None] = []  # of those that are compared
        self._identities: list[int] = []
        self._texts: list[str] = []
        self._weights: list[_Weight] = []  # that this rank holds whole
        self._settings = _Settings()
        self._digest = ""  # of settings, and of the weights' shapes and dtypes
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._seen: tuple[list[int], ...] = ()  # marks in the last pass that no rank has refused
        self._changed: list[int] = []
        self._turn = self._false_alarms = 0
        self._watched_passes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelComparison:
        return ModelComparison(self._mesh, deepcopy(self._model, memo))

    def begin(self, what: str, text: str) -> None:
        """Compare a text and the model's settings; weights and train or eval mode not, which may be
        loaded and set later. ``SequenceMesh.check`` compares the model from now on. Again where
        settings were changed between passes. Collective over the mesh.

        Raises:
            MeshError: they differ; it names the first setting that does.
        """
        if self._mesh.sp_group is None:
            return
        self._read(start=True)
        held = _digest(self._settings.entries(without="training"))
        self.agree(what, text, f"settings {held}", weights=False)
        models = self._mesh.checks.setdefault("models", _ModelsOfMesh())
        models.add(self)

    def leave(self) -> None:
        """``SequenceMesh.check`` no longer compares the model."""
        if "models" in self._mesh.checks:
            self._mesh.checks["models"].remove(self)

    @torch.no_grad()
    def of_pass(self, every_weight: bool = False) -> dict[str, Any]:
        """What the forward pass that begins compares of the model."""
        tensors = self._read()
        self._changed = self._changed_since(self._seen)
        turns = 1 if every_weight or not self._turn else max(1, -(-len(tensors) // _IN_A_PASS))
        sampled = slice(self._turn % turns, None, turns)
        pairs = zip(self._weights[sampled], tensors[sampled], strict=True)
        compared = {
            "settings": self._digest,
            "turn": self._turn,
            f"{_ELEMENTS} elements of weights": _by_dtype(
                (weight.dtype, weight.sample(x, self._turn)) for weight, x in pairs
            ),
        }
        if self._false_alarms < _FALSE_ALARMS:
            which = zlib.crc32(repr(self._changed).encode())
            compared["changed weights"] = f"{len(self._changed)} {which:08x}"
            if sum(self._weights[i].numel for i in self._changed) <= _FEW:
                compared["their elements"] = _by_dtype(
                    (self._weights[i].dtype, tensors[i].detach().reshape(-1)) for i in self._changed
                )
        return compared

    def state(self) -> object:
        """Equal as long as no setting is changed, and no weight written, moved or replaced."""
        self._read()
        return self._digest, self._marks()

    def end_pass(self) -> None:
        """After a comparison that no rank has refused."""
        self._seen, self._turn = self._marks(), self._turn + 1

    def end_of_forward(self) -> None:
        """After a forward pass: what it has written itself, as a length or a count, is no setting.
        It may be of a shard."""
        if self._watched_passes < _WATCHED_PASSES and self._mesh.sp_group is not None:
            self._watched_passes += 1
            self._leave_out(self._settings.written(self._attributes))

    def _leave_out(self, names: set[str]) -> None:
        if not names <= self._settings.left_out:
            self._settings.left_out |= names
            self._attributes = []  # laid out anew

    def agree(
        self, what: str, text: str, held: str, advice: str = "", weights: bool = True
    ) -> None:
        """Compare a text, and what this rank holds of the model. Collective over the mesh.

        Raises:
            MeshError: they differ. If models do, it names the first setting or weight; else it ends
                with the advice.
        """
        prefix = f"{what} (the model: "
        try:
            self._mesh.agree(f"{prefix}{held}), {text}")
        except MeshError as different:
            # Only where each rank has posted this are all of them here, and none waits elsewhere.
            posted = different.signatures
            if not posted or not all(x.startswith(prefix) for x in posted):
                raise
            worse = self.difference(weights)
            if worse is not None:
                raise worse from None
            try:
                self._mesh.agree(f"{what} {text}")
            except MeshError as other:
                message = "\n".join(filter(None, (str(other), advice)))
                raise MeshError(message, other.signatures, other.layouts) from None

    def difference(self, weights: bool = True) -> MeshError | None:
        """The first setting or weight that differs; None if none does. Collective over the mesh:
        every rank comes to the same result."""
        tensors = self._read(start=not weights)
        held = {
            "settings": self._settings.entries(without="" if weights else "training"),
            "weights": self._elements(tensors) if weights else {},
            "changed": [self._weights[i].name for i in self._changed if weights],
            "turn": self._turn,
            "written": sorted(self._settings.left_out),
        }
        ranks = gathered_values(self._mesh, held)
        # What a pass has written on one rank may have had that value on another.
        written = {name for each in ranks for name in each["written"]}
        self._leave_out(written)
        settings = [
            {name: x for name, x in each["settings"].items() if name not in written}
            for each in ranks
        ]
        error = _first_difference(settings, "settings", _TO_SET)
        if error is None:
            error = _first_difference([each["weights"] for each in ranks], "weights", _TO_LOAD)
        names = {name for each in ranks for name in each["changed"]}
        if error is None and names:  # of which few elements are equal
            all_elements = gathered_values(self._mesh, self._all_elements(tensors, names))
            error = _first_difference(all_elements, "weights", _TO_LOAD)
        if error is None and weights:
            self._false_alarms += any(each["changed"] != held["changed"] for each in ranks)
            self._turn = max(each["turn"] for each in ranks)
        return error

    def _elements(self, tensors: list[Tensor]) -> Entries:
        named = zip(self._names, self._texts, strict=True)
        entries = {name: [text] for name, text in named if name is not None}
        for weight, x in zip(self._weights, tensors, strict=True):
            sample = torch.cat([weight.sample(x.detach(), turn) for turn in (0, self._turn)])
            values = sample.double() if sample.is_floating_point() else sample
            entries[weight.name] += map(str, values.tolist())
        return entries

    def _all_elements(self, tensors: list[Tensor], names: set[str]) -> Entries:
        entries: Entries = {}
        for weight, x in zip(self._weights, tensors, strict=True):
            if weight.name in names:
                total = int(_sum_of_bits(x)) % 2**64
                entries[weight.name] = [f"elements with the digest {total:016x}"]
        return entries

    # ------------------------------------------------------------------ what this rank holds

    def _read(self, start: bool = False) -> list[Tensor]:
        """Bring up to date what is noted of settings and weights. Those that this rank holds whole.

        It runs in each pass: about a microsecond a module and weight.
        """
        # Configurations are read once. Modules compute with attributes of their own, and the rank
        # that saves a model changes its configuration.
        configs = list(_configs("config", getattr(self._model, "config", None))) if start else []
        children = list(chain.from_iterable(map(dict.values, self._children_of)))
        keys = list(chain.from_iterable(self._tensors_of))
        same = [id(x) for _, x in configs] == [id(x) for _, x in self._configs]
        changed = not same or (children, keys) != (self._children, self._keys)
        if changed or not self._attributes:
            self._lay_out(configs)
            changed = True
        try:
            changed |= self._settings.read(self._attributes)
        except KeyError:  # an attribute was deleted
            self._settings, self._attributes = _Settings(), []
            return self._read(start)
        tensors: list[Any] = list(chain.from_iterable(map(dict.values, self._tensors_of)))
        identities = list(map(id, tensors))
        whole: list[Tensor] = []
        if identities == self._identities:  # else places may be others'
            whole = [tensors[weight.place] for weight in self._weights]
        if not whole or [x.data_ptr() for x in whole] != self._addresses:
            texts, self._identities = self._texts, identities
            self._note_weights(tensors)
            whole = [tensors[weight.place] for weight in self._weights]
            changed |= texts != self._texts
        if changed:
            shapes = {str(i): [text] for i, text in enumerate(self._texts)}
            self._digest = _digest({**self._settings.entries(), **shapes})
        try:
            self._versions = [x._version for x in whole]
        except RuntimeError:  # of tensors that were made in inference mode
            self._versions = [0 if x.is_inference() else x._version for x in whole]
        return whole

    def _marks(self) -> tuple[list[int], ...]:
        """Of each weight; other ones where a tensor was replaced, moved or written."""
        return self._identities, self._addresses, self._versions

    def _changed_since(self, before: tuple[list[int], ...]) -> list[int]:
        marks, whole = self._marks(), range(len(self._weights))
        if marks == before:
            return []
        if not before or any(len(x) != len(y) for x, y in zip(marks, before, strict=True)):
            return list(whole)
        places = [weight.place for weight in self._weights]
        pairs = list(zip(marks, before, strict=True))
        (ids, old_ids), (addresses, old_addresses), (versions, old_versions) = pairs
        return [
            i
            for i in whole
            if versions[i] != old_versions[i]
            or addresses[i] != old_addresses[i]
            or ids[places[i]] != old_ids[places[i]]
        ]

    def _lay_out(self, configs: list[tuple[str, Any]]) -> None:
        named = dict(self._model.named_modules())
        self._configs = configs
        self._attributes = [_attributes(config) for _, config in configs]
        self._attributes += [module.__dict__ for module in named.values()]
        self._children_of = [module._modules for module in named.values()]
        self._children = list(chain.from_iterable(map(dict.values, self._children_of)))
        self._tensors_of = []
        self._keys, self._names, self._identities, seen = [], [], [], set[int]()
        for path, module in named.items():
            self._tensors_of += [module._parameters, module._buffers]
            unsaved = module._non_persistent_buffers_set
            for kind, left_out in ((module._parameters, set[str]()), (module._buffers, unsaved)):
                for key, x in kind.items():
                    none = x is None or id(x) in seen or key in left_out
                    self._keys.append(key)
                    self._names.append(None if none else f"{path}.{key}".removeprefix("."))
                    seen.add(id(x))
        self._settings.lay_out(configs, named)

    def _note_weights(self, tensors: list[Any]) -> None:
        self._weights, self._texts = [], []
        for place, (name, x) in enumerate(zip(self._names, tensors, strict=True)):
            is_whole = name is not None and x is not None and _is_whole(x)
            if is_whole:
                self._weights.append(_Weight(str(name), place, x))
            self._texts.append(self._weights[-1].text if is_whole else "in parts")
        self._addresses = [tensors[weight.place].data_ptr() for weight in self._weights]


class _Weight:
    """A weight that a rank holds whole, as it was when it was last looked at.

    Attributes:
        place: among all parameters and buffers.
    """

    def __init__(self, name: str, place: int, x: Tensor) -> None:
        self.name, self.place, self.numel = name, place, x.numel()
        self.dtype = str(x.dtype).removeprefix("torch.")
        self.text = f"{list(x.shape)} {self.dtype}"
        count = min(_ELEMENTS, self.numel)
        self._spacing = max(1, self.numel // _ELEMENTS)
        self._view = (count,), (self._spacing,)
        self._first = self.numel - 1 - (count - 1) * self._spacing
        self._offset, self._is_contiguous = x.storage_offset(), x.is_contiguous()

    def sample(self, x: Tensor, turn: int) -> Tensor:
        """Evenly spaced elements, others in each turn; in the first up to the last one, where a
        table that was enlarged has its new ones. How a weight lies in memory makes no difference.
        """
        shift = (turn * 0x9E3779B97F4A7C15 % 2**64 >> 32) % self._spacing
        first = self._first - shift
        if self._is_contiguous:  # a view takes a microsecond
            return x.as_strided(*self._view, self._offset + first)
        indices = torch.arange(self._view[0][0]) * self._spacing + first
        return x[torch.unravel_index(indices.to(x.device), x.shape)]


def _is_whole(weight: Tensor) -> bool:
    # Of weights that FSDP, ZeRO-3 or tensor parallelism shards, and of DeepSpeed's experts, ranks
    # hold different parts; of other tensor classes and those without values nothing can be read.
    if hasattr(weight, "ds_id") or hasattr(weight, "_fsdp_flattened"):
        return False
    if not getattr(weight, "allreduce", True):  # as DeepSpeed marks experts
        return False
    plain = type(weight.data) is Tensor and not nn.parameter.is_lazy(weight)
    readable = plain and weight.layout is torch.strided and weight.device.type != "meta"
    return readable and weight.numel() > 0 and weight.data_ptr() != 0


class _Settings:
    """Plain attributes of configurations and modules: those that each had when it was first seen,
    as what frameworks add later counts and times."""

    def __init__(self) -> None:
        self._first: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
        self._first_of_configs: dict[str, list[str]] = {}
        self.left_out: set[str] = set()  # by their names in entries
        self._fixed: Entries = {}
        self._scalars: list[tuple[int, list[str], Callable[[Any], tuple[Any, ...]]]] = []
        self._lists: list[tuple[int, str, str]] = []
        self._values: tuple[list[tuple[Any, ...]], list[Any]] = [], []

    def lay_out(self, configs: list[tuple[str, Any]], modules: dict[str, nn.Module]) -> None:
        """For other configurations or modules, by their paths."""
        self._fixed, self._scalars, self._lists = {}, [], []
        for i, (path, config) in enumerate(configs):
            values = _attributes(config)
            names = self._first_of_configs.setdefault(path, _names_of_settings(values, none=True))
            lists = [name for name in names if _is_list(values.get(name))]
            self._add(i, path, names, lists)
        for i, (path, module) in enumerate(modules.items(), len(configs)):
            self._fixed[path or "model"] = [type(module).__name__]
            values = vars(module)
            names = self._first.setdefault(module, _names_of_settings(values))
            lists = [name for name in names if _is_list(values.get(name))]
            # Modules have many, which do not change, but for PEFT's.
            fixed = {x: [_text(values[x])] for x in lists if x not in _OF_ADAPTERS}
            self._fixed |= {f"{path}.{x}".removeprefix("."): text for x, text in fixed.items()}
            names = [x for x in names if x in _OF_ADAPTERS or x not in lists]
            if names != ["training"]:
                self._add(i, path, names, [x for x in names if x in _OF_ADAPTERS])

    def _add(self, i: int, path: str, names: list[str], lists: list[str]) -> None:
        dot = f"{path}." if path else ""
        names = [name for name in names if dot + name not in self.left_out]
        lists = [name for name in lists if name in names]
        self._lists += [(i, name, dot + name) for name in lists]
        scalars = [name for name in names if name not in lists]
        if scalars:  # of a single one itemgetter would return no tuple
            self._scalars.append((i, [dot + x for x in scalars], itemgetter(*scalars, scalars[0])))

    def read(self, owners: list[dict[str, Any]]) -> bool:
        """Whether any has changed, given the attributes of all. KeyError: one was deleted."""
        scalars = [get(owners[i]) for i, _, get in self._scalars]
        lists = [_copied(owners[i][name]) for i, name, _ in self._lists]
        before, self._values = self._values, (scalars, lists)
        try:
            return before != self._values
        except (RuntimeError, ValueError):  # an attribute that was plain is an array now
            return True

    def written(self, owners: list[dict[str, Any]]) -> set[str]:
        """Those of modules' plain attributes that are others than when they were last read."""
        names: set[str] = set()
        for (i, paths, get), before in zip(self._scalars, self._values[0], strict=False):
            try:
                now = get(owners[i])
            except KeyError:  # it was deleted
                continue
            pairs = zip(paths, before, now, strict=False)
            names.update(path for path, old, new in pairs if _text(old) != _text(new))
        return names

    def entries(self, without: str = "") -> Entries:
        """All of them, configurations first; without those of this name."""
        scalars, lists = self._values
        entries: Entries = {}
        for (_, paths, _), values in zip(self._scalars, scalars, strict=True):
            entries |= {path: [_text(x)] for path, x in zip(paths, values, strict=False)}
        entries |= {path: [_text(x)] for (_, _, path), x in zip(self._lists, lists, strict=True)}
        entries |= self._fixed
        last = f".{without}"
        return {path: x for path, x in entries.items() if not f".{path}".endswith(last)}


def _names_of_settings(values: Mapping[str, Any], none: bool = False) -> list[str]:
    # What is None in a module may be a tensor later.
    return sorted(
        name
        for name, value in values.items()
        if (not name.startswith("_") or name in _OF_ADAPTERS)
        and (none or value is not None)
        and _NO_SETTINGS.isdisjoint(name.lower().split("_"))
        and _is_plain(value)
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= _MANY and all(_is_plain(x) for x in (*value, *value.values()))
    if isinstance(value, (list, tuple)):
        return len(value) <= _MANY and all(map(_is_plain, value))
    if isinstance(value, str):
        return "/" not in value  # a path, which a node may have for itself
    return value is None or isinstance(value, (int, float))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, (list, tuple)) else value


def _text(value: Any) -> str:
    """Equal for 1 and 1.0, for a tuple and a list: files hold either."""
    if isinstance(value, dict):
        each = sorted(f"{key}: {_text(inner)}" for key, inner in value.items())
        return f"{{{', '.join(each)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if not _is_plain(value):
        return type(value).__name__
    return repr(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _configs(path: str, config: Any) -> Iterator[tuple[str, Any]]:
    """A configuration, and those of its parts."""
    if hasattr(config, "to_dict") or isinstance(config, dict):
        yield path, config
        for name, inner in _attributes(config).items():
            if hasattr(inner, "to_dict") and not name.startswith("_"):
                yield from _configs(f"{path}.{name}", inner)


def _attributes(config: Any) -> dict[str, Any]:
    return config if isinstance(config, dict) else vars(config)


def _digest(entries: Entries) -> str:
    return blake2b(repr(list(entries.items())).encode(), digest_size=8).hexdigest()


def _by_dtype(rows: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Joined; on the CPU if they are on several devices, as where some weights are offloaded."""
    of_dtype: dict[str, list[Tensor]] = {}
    for dtype, row in rows:
        of_dtype.setdefault(dtype, []).append(row)
    joined = {}
    for dtype, each in of_dtype.items():
        devices = {x.device for x in each}
        parts = {}
        for device in devices if len(devices) > 1 else ():
            here = [x for x in each if x.device == device]
            parts[device] = iter(torch.cat(here).cpu().split([len(x) for x in here]))
        joined[dtype] = torch.cat([next(parts[x.device]) for x in each] if parts else each)
    return joined


def gathered_values(mesh: SequenceMesh, value: Any) -> list[Any]:
    """Every rank's value of plain types. Collective over the mesh."""
    data, group = json.dumps(value).encode(), mesh.consistency.group
    if group is None:
        return [value]
    lengths = all_gather_bytes(len(data).to_bytes(8, "little"), group)
    longest = max(int.from_bytes(x, "little") for x in lengths)
    return [json.loads(x) for x in all_gather_bytes(data.ljust(longest), group)]


def _first_difference(ranks: list[Entries], what: str, advice: str) -> MeshError | None:
    names = dict.fromkeys(name for each in ranks for name in each)
    differ = [x for x in names if any(each.get(x) != ranks[0].get(x) for each in ranks)]
    if not differ:
        return None
    texts = [each.get(differ[0], ["absent"]) for each in ranks]
    columns = zip_longest(*texts, fillvalue="absent")
    values = next(column for column in columns if len(set(column)) > 1)
    records = [CallRecord(Signature((f"{differ[0]}: {value}",))) for value in values]
    error = mismatch_error(records)
    message = f"{error}\n{len(differ)} of {len(names)} {what} of the model differ. {advice}"
    return MeshError(message, error.signatures)


class _ModelsOfMesh:
    """What ``SequenceMesh.check`` compares of enabled models."""

    def __init__(self) -> None:
        self._models: WeakValueDictionary[int, ModelComparison] = WeakValueDictionary()
        self._count = 0

    def add(self, model: ModelComparison) -> None:
        if any(other is model for other in self._models.values()):
            return
        self._models[self._count] = model
        self._count += 1

    def remove(self, model: ModelComparison) -> None:
        for number, other in list(self._models.items()):
            if other is model:
                del self._models[number]

    def __call__(self, mesh: SequenceMesh) -> None:
        # One that was dropped may still be there on some ranks, until its memory is collected.
        models = {str(number): model for number, model in self._models.items()}
        held = {x: ArgumentsDigest(model.of_pass(True)).text() for x, model in models.items()}
        ranks = gathered_values(mesh, held)
        for number in sorted(set.intersection(*map(set, ranks)), key=int):
            if len({each[number] for each in ranks}) > 1:
                error = models[number].difference()
                if error is not None:
                    raise error


_INTEGERS = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)  # by bytes


def _sum_of_bits(x: Tensor) -> Tensor:
    """A weighted sum of a tensor's elements, int64."""
    # Sums of bits as integers wrap around: exact in any order, so that unlike GPUs agree. Pieces:
    # an element takes 24 bytes meanwhile, and a video to encode took more than its tiles.
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    sums = []
    pieces = x.detach().reshape(-1).view(_INTEGERS[x.element_size()]).split(_CHUNK)
    for number, piece in enumerate(pieces):
        index = torch.arange(1, 1 + len(piece), device=x.device) + number * _CHUNK
        weights = index * 0x1E3779B97F4A7C15
        weights = (weights ^ (weights >> 29)) | 1  # unlike neighbours: swapped tokens show
        sums.append((piece.long() * weights).sum())
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


class ArgumentsDigest:
    """What tells the arguments of forward passes apart: shapes, dtypes and a sum over each tensor,
    and plain values. Mappings, lists and tuples are gone through; ``meta`` has no values.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._tensors: dict[str, tuple[tuple[int, ...], torch.dtype, torch.device]] = {}
        plain: list[str] = []
        sums: dict[torch.device, list[Tensor]] = {}
        for name, x in _flat("", given):
            if isinstance(x, Tensor):
                self._tensors[name] = tuple(x.shape), x.dtype, x.device
                sums.setdefault(x.device, []).append(_sum_of_bits(x))
            elif isinstance(x, (int, float, str)):
                plain.append(f"{name} {x}")
        self._plain = ", ".join(plain)
        # From a GPU to pinned memory, behind the work of its stream: the host goes on.
        self._sums = {
            device: torch.stack(each).to("cpu", non_blocking=device.type == "cuda")
            for device, each in sums.items()
            if device.type != "meta"
        }
        self._copied = {
            device: torch.cuda.current_stream(device).record_event()
            for device in self._sums
            if device.type == "cuda"
        }

    @property
    def is_known(self) -> bool:
        """Whether :meth:`text` need not wait for a GPU."""
        return not self._copied

    def text(self, values: bool = True) -> str:
        """A text that differs between arguments; without tensors' values it is known at once."""
        texts = {
            name: f"{name} {shape} {str(dtype).removeprefix('torch.')}"
            for name, (shape, dtype, _) in self._tensors.items()
        }
        if values:
            for event in self._copied.values():
                event.synchronize()
            numbers = {device: iter(sums.tolist()) for device, sums in self._sums.items()}
            for name, (_, _, device) in self._tensors.items():
                texts[name] += f" {next(numbers.get(device, iter([0]))):x}"
        return "; ".join((", ".join(texts.values()), self._plain))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner)
    else:
        yield name, value
