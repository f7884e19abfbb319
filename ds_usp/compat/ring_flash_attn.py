"""The names of the package ``ring_flash_attn`` (0.1.8), with its arguments, results and token
orders, on this engine::

    from ds_usp.compat import ring_flash_attn

    ring_flash_attn.install(ulysses_degree=2)  # and every import of the old name below stays

A function's mesh is that of its group: ``ulysses_degree`` of its ranks exchange heads, the ring
takes the rest. It is made at the first call, which is collective over the group as all are.
"""

from __future__ import annotations

import inspect
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import MappingProxyType, ModuleType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from ds_usp.attention.functional import usp_attention
from ds_usp.comm.keywords import explain_keywords, keyword_error
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.compat.flash_attention_forward import (
    CALLER,
    FUNCTION,
    HOME,
    FlashAttentionForward,
    PatchedFlashAttention,
    flash_attention_forward,
    on_host,
    patch_flash_attention,
)
from ds_usp.errors import ConfigError, PatchError, UnsupportedAttentionError, warn_once
from ds_usp.geometry.layout import DEFAULT_SP_ORDER
from ds_usp.geometry.masks import Borders, MaskSpec
from ds_usp.memory.compile_guard import disable_in_compile

# The functions' names, which `__getattr__` finds, are in `dir()` of the module.
__all__ = ["Installed", "install", "llama3_flash_attn_prepare_cu_seqlens"]

# The package's 18 functions: six families, each of which takes tensors in three forms.


class _Family(NamedTuple):
    """Functions that differ in how they take q, k and v alone.

    Args:
        kind: of the layout, over all ranks of the group.
        lengths: arguments between the tensors and the options.
    """

    kind: str
    lengths: tuple[str, ...] = ()


_LOCAL = ("cu_seqlens", "max_seqlen")
_PREPARED = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
# Their zigzag is one over all ranks, as megatron-core's: so it stays under any Ulysses degree.
_FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "ring_flash_attn": _Family("contiguous"),
        "ring_flash_attn_varlen": _Family("contiguous", _LOCAL),
        "zigzag_ring_flash_attn": _Family("context_parallel"),
        "zigzag_ring_flash_attn_varlen": _Family("context_parallel", _LOCAL),
        "stripe_flash_attn": _Family("striped"),
        "llama3_flash_attn_varlen": _Family(
            "contiguous", (*_PREPARED, "heads_k_stride", "local_k_slice")
        ),
    }
)
# A packed tensor has its two or three in the dim before the heads.
_FORMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"func": ("q", "k", "v"), "kvpacked_func": ("q", "kv"), "qkvpacked_func": ("qkv",)}
)
_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
        "group": None,
    }
)


class _Functions:
    """The names for one Ulysses degree.

    Attributes:
        ulysses_degree: ranks of a group that exchange heads; None: all.
        names: the 18 functions, by name.
        says_degree: what to log of the first mesh, on rank 0.
    """

    def __init__(self, ulysses_degree: int | None, says_degree: str = "") -> None:
        self.ulysses_degree, self.says_degree = ulysses_degree, says_degree
        self.names = {
            f"{family}_{form}": self._function(f"{family}_{form}", family, tensors)
            for family in _FAMILIES
            for form, tensors in _FORMS.items()
        }

    def _function(self, name: str, family: str, tensors: tuple[str, ...]) -> Callable[..., Any]:
        """One of the functions, with the signature of the package's."""
        kind, lengths = _FAMILIES[family]
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature(
            [
                *(inspect.Parameter(each, either) for each in (*tensors, *lengths)),
                *(inspect.Parameter(each, either, default=x) for each, x in _OPTIONS.items()),
            ]
        )

        # Documents would break the graph anyway, and a mesh is made while it is traced.
        @disable_in_compile(f"{name} plans its call while it runs: it cannot be in a graph")
        def function(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as wrong:  # one rank's loop may catch it and go on to another call
                error = keyword_error(function, args, kwargs) or wrong
                by_name = {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
                self.mesh(by_name.get("group")).consistency.check_call("", error=error)
                raise error from None
            bound.apply_defaults()
            packed = [bound.arguments.pop(each) for each in tensors]
            return self._attend(name, kind, packed, **bound.arguments)

        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"``ring_flash_attn.{name}``; tokens are {kind} over the group's ranks."
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    def mesh(self, group: dist.ProcessGroup | None) -> SequenceMesh:
        """The mesh of a group; the first call over it is collective."""
        mesh = SequenceMesh.shared(group, self.ulysses_degree, DEFAULT_SP_ORDER)
        if self.says_degree and mesh.sp_degree > 1:
            warn_once(self.says_degree.format(mesh.sp_degree), rank=mesh.rank)
            self.says_degree = ""
        return mesh

    def _attend(
        self,
        name: str,
        kind: str,
        packed: list[torch.Tensor],
        *,
        causal: bool,
        window_size: tuple[int, int],
        alibi_slopes: torch.Tensor | None,
        deterministic: bool,
        return_attn_probs: bool,
        group: dist.ProcessGroup | None,
        softmax_scale: float | None,
        dropout_p: float,
        **lengths: Any,
    ) -> Any:
        """Compute a call of the function ``name``; ``kind`` and ``lengths``: as of `_Family`."""
        mesh = self.mesh(group)
        with mesh.consistency.raising_everywhere():
            _refuse_options(name, kind, mesh, alibi_slopes, deterministic)
            q, k, v = _unpack(name, packed, ndim=3 if lengths else 4)
            documents: Borders = ()
            layout: Any = kind
            borders = [x for key, x in lengths.items() if key.startswith("cu_seqlens")]
            for x in borders:
                if not isinstance(x, torch.Tensor):
                    _borders_in(name, x)  # refused
            if "local_k_slice" in lengths:
                documents = mesh.readings.of(
                    borders,
                    ("llama3", q.shape[1], repr(lengths["local_k_slice"]), causal),
                    lambda: self._whole_documents(name, mesh, q.shape[1], causal, lengths),
                )
            elif lengths:
                local = mesh.readings.of(borders, "varlen", lambda: _borders_in(name, *borders))
                documents = tuple(mesh.sp_degree * border for border in local)
                layout = mesh.layout(kind, documents[-1], documents)
            mask = MaskSpec.window(*_window(causal, window_size), documents=documents)
        attend: Any = usp_attention
        result = attend(
            q,
            k,
            v,
            mesh=mesh,
            layout=layout,
            mask=mask,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            return_lse=return_attn_probs,
        )
        results = result if return_attn_probs else (result,)
        out, *lse = (x.squeeze(0) for x in results) if lengths else results
        return (out, *lse, None) if return_attn_probs else out

    def _whole_documents(
        self, name: str, mesh: SequenceMesh, tokens: int, causal: bool, prepared: Mapping[str, Any]
    ) -> Borders:
        """Borders of the whole sequence, from what each rank was given of its own ``tokens``.
        Collective over the mesh."""
        keys: slice = prepared["local_k_slice"]
        if not isinstance(keys, slice) or None in (keys.start, keys.stop):
            raise ConfigError(f"local_k_slice={keys!r} must be a slice with a start and a stop")
        lengths = on_host([prepared[key] for key in _PREPARED[:2]])
        queries, visible = (list(_borders_in(name, x)) for x in lengths)
        first, last = mesh.rank * tokens, (mesh.rank + 1) * tokens
        q_borders, k_borders = [first + x for x in queries], [keys.start + x for x in visible]
        ends = q_borders[0], q_borders[-1], k_borders[0], k_borders[-1]
        fits = ends == (first, last, keys.start, keys.stop) and queries == sorted(queries)
        fits &= q_borders[1:-1] == k_borders[1:-1] and k_borders[0] <= first
        if not fits or (k_borders[-1] != last if causal else k_borders[-1] < last):
            raise ConfigError(
                f"cu_seqlens_q {queries}, cu_seqlens_k {visible} and local_k_slice {keys} are not "
                f"those of the tokens {first} to {last} of rank {mesh.rank} with causal={causal}"
                ": give what llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, "
                "world_size) returned, with the same causal"
            )
        starts = torch.zeros(tokens, dtype=torch.bool, device=prepared[_PREPARED[0]].device)
        starts[[x for x in queries[1:-1] if x < tokens]] = True  # an empty one may end a shard
        starts[0] = k_borders[0] == first
        whole = mesh.gather(starts, mesh.layout("contiguous", tokens * mesh.sp_degree), 0)
        borders = (*whole.nonzero().flatten().tolist(), len(whole))
        begin = borders[bisect_right(borders, first) - 1]
        end = last if causal else borders[bisect_left(borders, last)]
        if (k_borders[0], k_borders[-1]) != (begin, end):
            raise ConfigError(
                f"local_k_slice {keys} of rank {mesh.rank} contradicts the documents {borders} "
                f"that the ranks' lengths make together, of which it needs the keys {begin} to "
                f"{end}: prepare the lengths of one batch on all ranks, with causal={causal}"
            )
        return borders


def _borders_in(name: str, cu_seqlens: Any) -> Borders:
    """The cumulative lengths as numbers; ConfigError for an argument that is none."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.is_complex():
        raise ConfigError(
            f"{name}: cumulative lengths must be a tensor of integers [documents + 1], not "
            f"{cu_seqlens!r}"
        )
    borders = tuple(cu_seqlens.tolist()) if cu_seqlens.ndim == 1 else ()
    whole = not cu_seqlens.is_floating_point() and borders == tuple(sorted(borders))
    if len(borders) < 2 or borders[0] != 0 or not whole:
        raise ConfigError(
            f"{name}: cumulative lengths are integers [documents + 1] that begin with 0 and do not "
            f"fall, not {cu_seqlens.tolist()}, {cu_seqlens.dtype}"
        )
    return borders


def _refuse_options(
    name: str, kind: str, mesh: SequenceMesh, alibi_slopes: torch.Tensor | None, deterministic: bool
) -> None:
    """Refuse what the function ``name`` cannot compute, in a layout of this ``kind``."""
    if kind == "striped" and mesh.ulysses_degree > 1:
        raise ConfigError(
            f"{name} has token t on rank t % {mesh.sp_degree}, an order that {mesh.ulysses_degree} "
            "Ulysses ranks cannot share: use zigzag_ring_flash_attn_* or ulysses_degree=1"
        )
    if alibi_slopes is not None:
        raise UnsupportedAttentionError(
            f"{name} is given alibi_slopes, and no kernel here adds ALiBi's bias to the scores: "
            "leave them out"
        )
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            f"{name}(deterministic=True): kernels are chosen by torch's own switch, "
            "torch.use_deterministic_algorithms(True)"
        )


def _unpack(name: str, packed: list[torch.Tensor], ndim: int) -> list[torch.Tensor]:
    """q, k and v ``[b, s, h, d]`` from tensors of any form, without ``b`` where ``ndim`` is 3."""
    if not all(isinstance(x, torch.Tensor) for x in packed):
        names = ", ".join(type(x).__name__ for x in packed)
        raise ConfigError(f"{name} takes tensors, got {names}")
    shapes, last = [list(x.shape) for x in packed], packed[-1]
    if len(packed) < 3 and last.ndim == ndim + 1 and last.shape[-3] == 4 - len(packed):
        packed = [*packed[:-1], *last.unbind(-3)]
    if len(packed) != 3 or any(x.ndim != ndim or not x.shape[-3] for x in packed):
        raise ConfigError(
            f"{name} takes {'[batch, ' if ndim == 4 else '['}tokens, heads, head_dim], tokens > 0, "
            f"with 2 or 3 before the heads where k and v, or q, k and v, are packed; got {shapes}"
        )
    return packed if ndim == 4 else [x.unsqueeze(0) for x in packed]


def _window(causal: bool, window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """The bounds of a mask, from flash-attn's: -1 is no bound, and causal means 0 on the right."""
    is_pair = isinstance(window_size, Sequence) and len(window_size) == 2
    if not is_pair or not all(isinstance(bound, int) for bound in window_size):
        raise ConfigError(
            f"window_size={window_size!r} must be two whole numbers, (left, right), -1 for no bound"
        )
    left, right = (None if bound < 0 else bound for bound in window_size)
    return left, 0 if causal else right


# Packed documents on contiguous shards, as the llama3 functions take them.


@disable_in_compile("borders of documents are read: they cannot be in a graph")
def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """Find a rank's queries in the documents of the whole sequence, and the keys that they need.

    Args:
        cu_seqlens: ``[documents + 1]``, cumulative lengths of the whole sequence.
        causal: the keys end with the rank's last token, else with that token's document.
        rank, world_size: of the group, whose ranks hold equally many tokens each, in order.

    Returns:
        ``cu_seqlens_q``, ``cu_seqlens_k``, the longest of each, and the slice of the keys.

    Raises:
        ConfigError: no cumulative lengths, no token, lengths that do not divide, or no such rank.
    """
    borders = list(_borders_in("llama3_flash_attn_prepare_cu_seqlens", cu_seqlens))
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must be one of 0 to {world_size - 1}, of world_size")
    tokens, rest = divmod(borders[-1], world_size)
    if rest or not tokens:
        raise ConfigError(
            f"cu_seqlens ends at {borders[-1]}, which {world_size} ranks do not divide: pad the "
            f"sequence by {world_size - rest} tokens, as a document of their own"
        )
    first, last = rank * tokens, (rank + 1) * tokens
    left, right = bisect_left(borders, first), bisect_left(borders, last)
    left -= borders[left] != first
    keys = borders[left : right + 1]
    queries = [min(max(border, first), last) - first for border in keys]
    if causal:
        keys[-1] = last
    return (
        cu_seqlens.new_tensor(queries),
        cu_seqlens.new_tensor([border - keys[0] for border in keys]),
        max(b - a for a, b in pairwise(queries)),
        max(b - a for a, b in pairwise(keys)),
        slice(keys[0], keys[-1]),
    )


# Its adapter for transformers: one function is replaced, and each batch says its documents before
# its pass. The attention is that of ``flash_attention_forward``, of any transformers from 4.51 on.


class _Adapter:
    """``ring_flash_attn.adapters.hf_adapter``.

    Attributes:
        data_params: what :func:`llama3_flash_attn_prepare_cu_seqlens` returned of the last batch.
        lengths: cumulative lengths of that batch ``[documents + 1]``; None: there was none yet.
        mesh: of the group that attention was substituted for; None: not yet.
    """

    def __init__(self, functions: _Functions) -> None:
        self._functions = functions
        self.data_params: dict[str, Any] = {}
        self.lengths: torch.Tensor | None = None
        self.mesh: SequenceMesh | None = None
        self._patches: tuple[PatchedFlashAttention, ...] = ()

    @property
    def names(self) -> dict[str, Any]:
        return {
            "DATA_PARAMS": self.data_params,
            "check_params": check_params,
            "create_ring_flash_attention_forward": self.create_forward,
            "flash_attention_forward": call_function_of_home,
            "substitute_hf_flash_attn": self.substitute,
            "update_ring_flash_attn_params": self.update,
            "use_ring_attn": self.switch,
        }

    def update(self, cu_seqlens: torch.Tensor, process_group: dist.ProcessGroup) -> None:
        """Take the documents of the next passes.

        Args:
            cu_seqlens: ``[documents + 1]``, cumulative lengths of the whole sequence, which the
                ranks of the group hold in equal, contiguous pieces.

        Raises:
            ConfigError: the ranks do not divide the sequence.
        """
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        prepared = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world_size)
        self.data_params.update(zip((*_PREPARED, "local_k_slice"), prepared, strict=True))
        self.lengths = cu_seqlens.detach().to("cpu", copy=True)

    def create_forward(
        self, process_group: dist.ProcessGroup, heads_k_stride: int
    ) -> list[FlashAttentionForward]:
        """Return what :meth:`substitute` puts in: one function for any version of transformers."""
        return [self._with_documents(flash_attention_forward(self._functions.mesh(process_group)))]

    def substitute(self, process_group: dist.ProcessGroup, heads_k_stride: int) -> None:
        """Replace transformers' flash attention by attention over the mesh of a group, and what an
        earlier call has put in. Collective over the group.

        Args:
            heads_k_stride: not needed: heads are divided as the call's plan says.

        Raises:
            ConfigError: transformers before 4.51, or another package has replaced its function.
        """
        mesh = self._functions.mesh(process_group)
        self.restore()
        self.mesh = mesh
        self.switch(True)

    def switch(self, flag: bool) -> None:
        """Use the replacement, once there is a group, or transformers' own function."""
        if not flag:
            self.restore()
        elif self.mesh is not None and not self._patches:
            inner = patch_flash_attention(self.mesh)
            outer = PatchedFlashAttention(
                inner.replacement, self._with_documents(inner.replacement)
            )
            self._patches = outer, inner

    def restore(self) -> None:
        """Put transformers' own function back."""
        for patch in self._patches:
            patch.restore()
        self._patches = ()

    def _with_documents(self, forward: FlashAttentionForward) -> FlashAttentionForward:
        """Return it with the lengths of the last :meth:`update`, read at each call."""

        @wraps(forward, updated=())
        def ring_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self.lengths is not None:
                kwargs |= {"cu_seq_lens_q": self.lengths, "cu_seq_lens_k": self.lengths}
            return forward(*args, **kwargs)

        return ring_forward


def check_params(f1: Callable[..., Any], f2: Callable[..., Any]) -> bool:
    """Whether ``f2`` takes all arguments of ``f1``, the function that it replaces."""
    parameters = inspect.signature(f2).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return True
    return parameters.keys() >= inspect.signature(f1).parameters.keys()


def call_function_of_home(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """transformers' own entry of ``ALL_ATTENTION_FUNCTIONS``, with the function that stands in its
    home now."""
    # Programs (axolotl's batch_ring) replace it there; the entry's module has its own reference.
    home, caller = import_module(HOME), import_module(CALLER)
    setattr(caller, FUNCTION, getattr(home, FUNCTION))
    return caller.flash_attention_forward(module, *args, **kwargs)


# The module under its old name.


class _LeftOut(int):
    """A default that is another object than the same number given by a caller."""


_LEFT_OUT: Final = _LeftOut(1)


@explain_keywords
def install(ulysses_degree: int | None = _LEFT_OUT) -> Installed:
    """Put the names into ``sys.modules`` under ``ring_flash_attn``, before anything imports it.

    Args:
        ulysses_degree: ranks of each group that exchange heads; the ring takes the rest. Left out,
            or 1: a ring of all, as the package is; None: no ring.

    Returns:
        What takes them out again: ``restore()``, or the end of a ``with``.

    Raises:
        PatchError: ``ring_flash_attn`` is imported already.
    """
    return Installed(ulysses_degree)


class Installed(AbstractContextManager["Installed"]):
    """``ring_flash_attn`` and its submodules in ``sys.modules``.

    Attributes:
        module: ``ring_flash_attn``.
    """

    def __init__(self, ulysses_degree: int | None) -> None:
        module = sys.modules.get(_NAME)
        # A program's own file ring_flash_attn.py may call install() while it is imported: who
        # imports the file gets what stands in sys.modules afterwards.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            raise PatchError(
                f"{_NAME} is imported already, from {getattr(module, '__file__', None)}: what has "
                "its functions would keep them. Call install() before the first import of it, and "
                "once; restore() what it returned before another ulysses_degree"
            )
        functions = _Functions(ulysses_degree)
        if ulysses_degree is _LEFT_OUT:
            functions = _Functions(1, _A_RING)
        self._adapter = _Adapter(functions)
        self._modules = _modules(functions, self._adapter)
        self.module = self._modules[_NAME]
        sys.modules.update(self._modules)

    def restore(self) -> None:
        """Take the modules out, and transformers' own function back in; what has imported their
        functions keeps them."""
        self._adapter.restore()
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def __exit__(self, *_: object) -> None:
        self.restore()


_NAME: Final = "ring_flash_attn"
_A_RING: Final = (
    "ring_flash_attn.install() without ulysses_degree is a ring of all {} ranks, as that package "
    "is (elsewhere in ds_usp all ranks exchange heads): ulysses_degree=n lets n ranks exchange "
    "heads, None all; 1 says this line's meaning"
)
_PUBLIC = ("substitute_hf_flash_attn", "update_ring_flash_attn_params")


def _modules(functions: _Functions, adapter: _Adapter) -> dict[str, ModuleType]:
    """The package's modules by name, each with the names that its users import from it."""
    prepare = {"llama3_flash_attn_prepare_cu_seqlens": llama3_flash_attn_prepare_cu_seqlens}
    adapter_names = {name: adapter.names[name] for name in _PUBLIC}
    contents: dict[str, Mapping[str, Any]] = {
        "": {**functions.names, **prepare, **adapter_names},
        "adapters": adapter_names,
        "adapters.hf_adapter": adapter.names,
        "utils": {name: partial(_refuse_part, name) for name in _PARTS},
    }
    for family in _FAMILIES:
        names = [f"{family}_{form}" for form in _FORMS]
        contents[family] = {name: functions.names[name] for name in names}
    contents["llama3_flash_attn_varlen"] = {**contents["llama3_flash_attn_varlen"], **prepare}
    modules: dict[str, ModuleType] = {}
    for name, content in contents.items():
        full_name = f"{_NAME}.{name}" if name else _NAME
        module = modules[full_name] = ModuleType(full_name, __doc__)
        module.__spec__ = ModuleSpec(full_name, None, is_package=name in ("", "adapters"))
        module.__dict__.update(content)
        parent, _, child = full_name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


# Programs that make a ring of kernels of their own import these, and some do at their start.
_PARTS = (
    *("AllGatherComm", "RingComm", "flatten_varlen_lse", "get_default_args"),
    *("unflatten_varlen_lse", "update_out_and_lse"),
)


def _refuse_part(name: str, *_: object, **__: object) -> None:
    raise UnsupportedAttentionError(
        f"ring_flash_attn.utils.{name} is a part of a ring of one's own kernels, which ds_usp does "
        "not run: call llama3_flash_attn_varlen_func or another function of ring_flash_attn, "
        "behind which ds_usp chooses among FlashAttention 2, 3 and 4 itself"
    )


# Without install(): a ring of all ranks, as the package is.
_RING: Final = _Functions(1)
_RING_ADAPTER: Final = _Adapter(_RING)


def __getattr__(name: str) -> Any:
    if name in _RING.names:
        return _RING.names[name]
    if name in _PUBLIC:
        return _RING_ADAPTER.names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_RING.names, *_PUBLIC})
