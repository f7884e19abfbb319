"""CUDA graphs of a transformer's forward passes, for sampling."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ds_usp.attention.tuning import Tuning
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.config import p2p_disabled_reason
from ds_usp.errors import ConfigError, UnsupportedAttentionError, USPError
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.warn_once import warn_once

_MAX_KINDS = 16  # of forward passes; their graphs share memory, but for arguments and outputs
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_ADAPTER = "unscale_layer"  # a method of PEFT's layers
Key = tuple[object, ...]


def check_graphs(mesh: SequenceMesh, tuning: Tuning) -> None:
    """Refuse CUDA graphs where they cannot be captured.

    Raises:
        ConfigError: no GPU, or exchanges by NCCL.
    """
    if not torch.cuda.is_available():
        raise ConfigError("cuda_graphs=True needs a GPU; use cuda_graphs=False")
    why = mesh.copy_engine_unavailable or p2p_disabled_reason()
    why = "tuning has copies=False" if tuning.copies is False else why
    if mesh.sp_degree > 1 and why is not None:
        raise ConfigError(
            f"cuda_graphs=True needs exchanges by copy engines, but {why}: a communicator of NCCL "
            "that is in a CUDA graph does not end. Use cuda_graphs=False"
        )


class Mode(Enum):
    """How a forward pass runs; the text is what ranks compare."""

    GRADIENTS = "with gradients, without a CUDA graph"
    FIRST = "the first of its kind, without a CUDA graph"
    CAPTURE = "captured in a CUDA graph"
    REPLAY = "replayed from a CUDA graph"


class Graph(Protocol):
    """What :class:`torch.cuda.CUDAGraph` has."""

    def capture_end(self) -> None:
        """Stop capturing."""

    def replay(self) -> None:
        """Launch what was captured."""


class CudaGraphs:
    """Makes CUDA graphs whose memory is one pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The stream that is captured; the GPU is idle."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self) -> Graph:
        """Capture the current stream from here on."""
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and of data loaders may call CUDA meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph


class RecordedPass:
    """A captured forward pass: its arguments' buffers, its graphs, and the collectives between.

    Args:
        graphs: makes them.
        tensors: the arguments of the pass that is captured.

    Attributes:
        arguments: the tensors that the captured pass reads.
    """

    def __init__(self, graphs: CudaGraphs, tensors: Sequence[Tensor]) -> None:
        self._graphs = graphs
        self.arguments = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        self._parts: list[Callable[[], object]] = []
        self._outputs: list[Any] = []
        self._structure: Any = None
        self._capturing: Graph | None = None

    def capture(self, forward: Callable[[], Any]) -> None:
        """Capture a pass, which computes nothing yet."""
        with self._graphs.stream():
            self._capturing = self._graphs.begin()
            try:
                self._outputs, self._structure = _pytree.tree_flatten(forward())
            except BaseException:
                with suppress(RuntimeError):  # the error before it says why
                    self._end_graph()
                raise
            self._end_graph()

    def _end_graph(self) -> None:
        graph, self._capturing = self._capturing, None
        if graph is None:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # nothing after the join
            graph.capture_end()
        self._parts.append(graph.replay)

    def between_graphs(self, collective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A collective of NCCL, which no graph may hold: see :func:`check_graphs`."""
        self._end_graph()
        joined = collective(x)  # of what no kernel has written yet
        self._parts.append(lambda: joined.copy_(collective(x)))
        self._capturing = self._graphs.begin()
        return joined

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """A pass with other values of its arguments; its outputs are not overwritten by others."""
        for buffer, x in zip(self.arguments, tensors, strict=True):
            if buffer.shape != x.shape:  # changed since the ranks have compared it
                raise ConfigError(
                    f"a hook has changed an argument {list(buffer.shape)} to {list(x.shape)} after "
                    "the ranks have compared it: register it before enable, or use "
                    "cuda_graphs=False"
                )
            buffer.copy_(x)
        for part in self._parts:
            part()
        outputs = [x.clone() if isinstance(x, Tensor) else x for x in self._outputs]
        return _pytree.tree_unflatten(outputs, self._structure)


class ForwardGraphs:
    """The forward function of a transformer, which captures passes and replays them.

    The first pass of a kind runs without a graph, which allocates staging buffers and compiles
    kernels; the second is captured, and it and those after it are replayed. A kind is the shapes of
    the tensors among the arguments, the values of the others, and the addresses of the weights.
    With autograd nothing is captured.

    Args:
        transformer: whose ``forward`` it is; the arguments are this rank's shards by then.
        own_hooks: the ids of the hooks on its modules that a replay may leave out.
    """

    def __init__(self, transformer: nn.Module, own_hooks: frozenset[int]) -> None:
        self._transformer, self._own_hooks = transformer, own_hooks
        self._graphs = CudaGraphs()
        self._modules: Key = ()  # what the recorded passes were captured with
        self._recorded: dict[Key, RecordedPass | None] = {}  # None: one pass has run
        self._kind: Key | None = None  # of the pass that has begun; None: it is not captured
        self._recording: RecordedPass | None = None
        # diffusers reads it.
        self.__signature__ = inspect.signature(type(transformer).forward.__get__(transformer))

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardGraphs:
        """Of a copy of the transformer: nothing is captured yet."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        ForwardGraphs.__init__(twin, copy.deepcopy(self._transformer, memo), self._own_hooks)
        return twin

    def clear(self) -> None:
        """Drop all graphs, after the passes in flight."""
        self._kind = None
        if self._recorded:
            torch.cuda.synchronize()
            self._recorded.clear()
            self._graphs = CudaGraphs()  # torch takes no pool again whose graphs are gone

    def choose(self, arguments: Mapping[str, Any]) -> Mode:
        """Decide how the pass that begins will run.

        Raises:
            UnsupportedAttentionError: arguments, or changes of modules, that no graph repeats.
        """
        self._kind = None
        if torch.is_grad_enabled():
            return Mode.GRADIENTS
        modules = tuple(_identities(self._transformer))
        if modules != self._modules:
            _check_modules(self._transformer, self._own_hooks)
            self.clear()
            self._modules = modules
        self._kind = self._kind_of(arguments)
        if self._kind not in self._recorded:
            return Mode.FIRST
        return Mode.CAPTURE if self._recorded[self._kind] is None else Mode.REPLAY

    def _kind_of(self, arguments: Mapping[str, Any]) -> Key:
        name = type(self._transformer).__name__
        device = next(self._transformer.parameters()).device
        leaves, structure = _pytree.tree_flatten(dict(arguments))
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        modes = *autocast, torch.is_inference_mode_enabled(), self._transformer.training
        kind: list[object] = [str(structure), *modes]
        for x in leaves:
            if isinstance(x, Tensor) and x.device == device:
                kind.append((x.shape, x.dtype))
            elif isinstance(x, Tensor):
                raise UnsupportedAttentionError(
                    f"{name}: an argument {list(x.shape)} is on {x.device}, and a CUDA graph takes "
                    f"tensors on {device} only: move it there, or use cuda_graphs=False"
                )
            elif isinstance(x, _PLAIN):
                kind.append((type(x), x))
            else:
                raise UnsupportedAttentionError(
                    f"{name}: a CUDA graph cannot tell one argument of the type "
                    f"{type(x).__name__} from another: use cuda_graphs=False"
                )
        return tuple(kind)

    @disable_in_compile("forward passes are captured in CUDA graphs")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass, in the way that :meth:`choose` has decided."""
        forward = partial(type(self._transformer).forward, self._transformer)
        kind, self._kind = self._kind, None
        if kind is None:
            return forward(*args, **kwargs)
        if kind not in self._recorded:
            out = forward(*args, **kwargs)
            if len(self._recorded) == _MAX_KINDS:
                self._warn_and_clear()
            self._recorded[kind] = None
            return out
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        recorded = self._recorded[kind]
        if recorded is None:
            recorded = RecordedPass(self._graphs, tensors)
            buffers = iter(recorded.arguments)
            leaves = [next(buffers) if isinstance(x, Tensor) else x for x in leaves]
            args, kwargs = _pytree.tree_unflatten(leaves, structure)
            self._capture(recorded, partial(forward, *args, **kwargs))
            self._recorded[kind] = recorded
        return recorded.replay(tensors)

    def _warn_and_clear(self) -> None:
        warn_once(
            f"{type(self._transformer).__name__}: {_MAX_KINDS} kinds of forward passes have CUDA "
            "graphs; all are dropped for one more. If an argument is a number that changes with "
            "each step, give it as a tensor: the values of others make a kind",
            rank=0,
        )
        self.clear()

    def _capture(self, recorded: RecordedPass, forward: Callable[[], Any]) -> None:
        self._recording = recorded
        try:
            recorded.capture(forward)
        except USPError:
            raise
        except RuntimeError as error:
            raise UnsupportedAttentionError(
                f"a forward pass of {type(self._transformer).__name__} cannot be captured in a "
                f"CUDA graph: {error}. Use cuda_graphs=False"
            ) from error
        finally:
            self._recording = None

    def outside(self, collective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A collective of NCCL within a pass: between graphs, if the pass is being captured."""
        if self._recording is None:
            return collective(x)
        return self._recording.between_graphs(collective, x)


def _identities(transformer: nn.Module) -> Iterator[object]:
    """What a captured pass depends on: addresses of weights and buffers, modules, their hooks."""
    for module in transformer.modules():
        own = vars(module)
        yield id(module)
        yield id(own.get("_compiled_call_impl"))
        yield id(own.get("forward"))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            yield from hooks
        for tensors in (module._parameters, module._buffers):
            for x in tensors.values():
                if x is not None:  # of quantized weights that wrap others the object itself
                    yield x.data_ptr() if type(x) in (Tensor, nn.Parameter) else id(x)


def _check_modules(transformer: nn.Module, own_hooks: frozenset[int]) -> None:
    """Refuse what happens around modules and would not be repeated by a graph.

    Raises:
        UnsupportedAttentionError: hooks inside of the transformer, forward functions that were
            replaced (by offloading), or adapters that are not fused.
    """
    name = type(transformer).__name__
    for path, module in transformer.named_modules():
        why = ""
        hooks = {*module._forward_pre_hooks, *module._forward_hooks} - own_hooks
        if "_hf_hook" in vars(module) or (path and "forward" in vars(module)):
            why = "has a forward function of offloading or of a hook, which may move its weights"
        elif path and hooks:
            why = "has a hook of another library or yours, which a graph does not call"
        elif hasattr(module, _ADAPTER):
            why = (
                "is a layer of PEFT, whose scale and choice of adapters a graph does not follow: "
                "fuse_lora() and unload_lora_weights() before enable"
            )
        if why:
            raise UnsupportedAttentionError(
                f"{name} with cuda_graphs=True: {path or 'the transformer'} {why}. Or use "
                "cuda_graphs=False"
            )
