"""CUDA graphs of a transformer's forward passes, for sampling; each rank captures its own."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ds_usp.attention.tuning import Tuning
from ds_usp.comm.copy_engine import note_replay
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.config import p2p_disabled_reason, single_hw_queue
from ds_usp.errors import ConfigError, UnsupportedAttentionError, USPError, warn_once
from ds_usp.integrations.diffusers.branches import BranchCalls
from ds_usp.integrations.diffusers.pass_state import is_adapter
from ds_usp.memory.compile_guard import disable_in_compile

_MAX_KINDS = 16  # of forward passes; their graphs share memory, but for arguments and outputs
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
Key = tuple[object, ...]


class Mode(Enum):
    """How a forward pass runs; the text is what ranks compare."""

    GRADIENTS = "run with gradients"
    FIRST = "run without a CUDA graph, as the first of its kind"
    CAPTURE = "captured in a CUDA graph"
    REPLAY = "replayed from a CUDA graph"


class CudaGraphs:
    """Makes CUDA graphs whose memory is one pool, on the current device."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self.renew()

    def renew(self) -> None:
        """Take another pool: torch takes none again whose graphs are all gone."""
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def stream(self) -> Iterator[None]:
        # As torch.cuda.graph does before a capture.
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self) -> Any:
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and of data loaders may call CUDA meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph


class _HeldInputs(TorchDispatchMode):
    """Holds the tensors that operators read, as long as a :class:`RecordedPass` may replay them."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A module's cache, as QwenImage's of 128 rotary embeddings, may drop a tensor before that.
        leaves = _pytree.tree_leaves((args, kwargs))
        self._held += [x for x in leaves if isinstance(x, Tensor)]
        return func(*args, **(kwargs or {}))


class RecordedPass:
    """A captured forward pass: its arguments' buffers, its graphs, and the collectives between.

    Attributes:
        arguments: buffers like ``tensors``, which the captured pass reads and a replay writes.
        held: closed when operators' inputs need not be held any more.
    """

    def __init__(self, graphs: CudaGraphs, tensors: Sequence[Tensor]) -> None:
        self._graphs = graphs
        self.arguments = [torch.empty_like(x) for x in tensors]
        self.held, self._inputs = ExitStack(), _HeldInputs()
        self._parts: list[Callable[[], object]] = []
        self._outputs: list[Any] = []
        self._structure: Any = None
        self._capturing: Any = None

    def capture(self, forward: Callable[[], Any]) -> None:
        """Capture ``forward`` with the buffers as arguments; only its collectives run."""
        with self._graphs.stream(), _no_autocast_cache(), self.held:
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
        # Runs it once now, for the form of its output, into which each replay copies the result.
        self._end_graph()
        joined = collective(x)  # of what no kernel has written yet
        self._parts.append(lambda: joined.copy_(collective(x)))
        self._capturing = self._graphs.begin()
        return joined

    def hold_inputs(self) -> None:
        """Hold what operators read, until ``held`` is closed or the capture ends, well or not."""
        self.held.enter_context(self._inputs)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """A pass with other values of its arguments; its outputs are not overwritten by others."""
        for buffer, x in zip(self.arguments, tensors, strict=True):
            buffer.copy_(x)
        for part in self._parts:
            part()
        outputs = [x.clone() if isinstance(x, Tensor) else x for x in self._outputs]
        return _pytree.tree_unflatten(outputs, self._structure)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Casts of weights are made in the graph: the cache's would be freed with its context."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class ForwardGraphs:
    """The forward function of a transformer, which captures passes and replays them. Before each
    pass ``ShardedTransformer`` lets it :meth:`choose`.

    The first pass of a kind runs without a graph, which allocates staging buffers and compiles
    kernels; the second is captured, and it and those after it are replayed. A kind is the shapes of
    the tensors among the arguments, the values of the others and the ranks that compute a sample;
    all are dropped where modules or weights were replaced. With autograd nothing is captured.

    Attributes:
        own_hooks: the ids of ds_usp's hooks on its modules, which a replay may leave out.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self._transformer = transformer
        self.own_hooks: frozenset[int] = frozenset()
        self._name = type(transformer).__name__
        self._graphs = CudaGraphs()
        self._modules: Key = ()  # what the recorded passes were captured with
        self._recorded: dict[Key, RecordedPass | None] = {}  # None: one pass has run
        self._refused: dict[Key, str] = {}  # why kinds cannot be captured
        # Kind and mesh of the pass that has begun; None: it is not captured.
        self._begun: tuple[Key, SequenceMesh] | None = None
        self._recording: RecordedPass | None = None
        # diffusers reads it.
        self.__signature__ = inspect.signature(type(transformer).forward.__get__(transformer))

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardGraphs:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        ForwardGraphs.__init__(twin, copy.deepcopy(self._transformer, memo))
        twin.own_hooks = self.own_hooks
        return twin

    def clear(self) -> None:
        """Drop all graphs, and the choice for the pass that has begun. Replays in flight run to
        their end; one that waits for a rank that does not come ends when the mesh has failed."""
        self._begun = None
        if self._recorded:
            self._recorded.clear()
            self._graphs.renew()

    def choose(self, arguments: Mapping[str, Any], mesh: SequenceMesh) -> tuple[Mode, str]:
        """Return the next call's mode, and a text of its mode and kind, which ranks compare.

        Args:
            arguments: of this rank's samples, by name, before anything is sharded.
            mesh: the ranks that compute a sample, whose exchanges a graph contains.

        Raises:
            ConfigError: weights on another device.
            UnsupportedAttentionError: arguments, or changes of modules, that no graph repeats.
        """
        self._begun = None
        if torch.is_grad_enabled():
            return Mode.GRADIENTS, Mode.GRADIENTS.value
        modules = tuple(identities(self._transformer))
        if modules != self._modules:
            check_device(self._name, next(self._transformer.parameters()).device)
            check_modules(self._transformer, self.own_hooks)
            self.clear()
            self._refused.clear()
            self._modules = modules
        kind = mesh.sp_degree, *self._kind_of(arguments)
        if kind in self._refused:
            raise UnsupportedAttentionError(self._refused[kind])
        mode = Mode.FIRST
        if kind in self._recorded:
            mode = Mode.CAPTURE if self._recorded[kind] is None else Mode.REPLAY
        if mode is not Mode.REPLAY:
            check_compiled(self._transformer, "cuda_graphs=True")
        self._begun = kind, mesh
        return mode, f"{mode.value} ({zlib.crc32(repr(kind).encode()):08x})"

    def _kind_of(self, arguments: Mapping[str, Any]) -> Key:
        device = next(self._transformer.parameters()).device
        present = {name: x for name, x in arguments.items() if x is not None}
        leaves, structure = _pytree.tree_flatten(present)
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        modes = *autocast, torch.is_inference_mode_enabled(), self._transformer.training
        kind: list[object] = [str(structure), *modes]
        for x in leaves:
            if isinstance(x, Tensor) and x.device == device:
                kind.append((x.shape, x.dtype))
            elif isinstance(x, Tensor):
                raise UnsupportedAttentionError(
                    f"{self._name}: an argument {list(x.shape)} is on {x.device}, and a CUDA graph "
                    f"takes tensors on {device} only: move it there, or use cuda_graphs=False"
                )
            elif isinstance(x, _PLAIN):
                kind.append((type(x), x))
            else:
                raise UnsupportedAttentionError(
                    f"{self._name}: a CUDA graph cannot distinguish two arguments of the "
                    f"type {type(x).__name__}: use cuda_graphs=False"
                )
        return tuple(kind)

    @disable_in_compile("forward passes are captured in CUDA graphs")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(type(self._transformer).forward, self._transformer)
        begun, self._begun = self._begun, None
        if begun is None:
            return forward(*args, **kwargs)
        kind, mesh = begun
        if kind not in self._recorded:
            # In the modes of the capture, all of which torch.compile guards: in others blocks would
            # be compiled again within it, and tuning their kernels waits for the GPU.
            with _no_autocast_cache():
                out = forward(*args, **kwargs)
            self._drop_oldest(mesh.rank)
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
            self._capture(kind, recorded, partial(forward, *args, **kwargs))
            self._recorded[kind] = recorded
        # As for attention calls: a rank that does not come is noticed, and waits for it are ended.
        mesh.consistency.check_call(f"a replayed pass of {self._name}", wait=False)
        note_replay(mesh.copy_engines)
        return recorded.replay(tensors)

    def _drop_oldest(self, rank: int) -> None:
        if len(self._recorded) < _MAX_KINDS:
            return
        warn_once(
            f"{self._name}: forward passes of more than {_MAX_KINDS} kinds; the oldest CUDA graph "
            "is dropped for each further one. Numbers among the arguments make kinds by their "
            "values, tensors by their shapes: give a number that changes with each step as a "
            "tensor, and pad text to few lengths",
            rank=rank,
        )
        # Ranks have compared the kinds of their passes: all of the mesh drop the same one.
        del self._recorded[next(iter(self._recorded))]
        if not any(self._recorded.values()):
            self._graphs.renew()

    def _capture(self, kind: Key, recorded: RecordedPass, forward: Callable[[], Any]) -> None:
        self._recording = recorded
        try:
            recorded.capture(forward)
        except (USPError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            self._refused[kind] = (
                f"a forward pass of {self._name} cannot be captured in a CUDA graph: {error}. Use "
                "cuda_graphs=False"
            )
            raise UnsupportedAttentionError(self._refused[kind]) from error
        finally:
            self._recording = None

    # Hooks before and after the modules whose outputs the plan shards: they may cache tensors.
    @disable_in_compile("a pass is captured in CUDA graphs")
    def watch(self, *_: Any) -> None:
        if self._recording is not None:
            self._recording.hold_inputs()

    @disable_in_compile("a pass is captured in CUDA graphs")
    def unwatch(self, *_: Any) -> None:
        if self._recording is not None:
            self._recording.held.close()

    def outside(self, collective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a collective of NCCL within a pass: between graphs, if it is being captured."""
        if self._recording is None:
            return collective(x)
        return self._recording.between_graphs(collective, x)


def check_graphs(mesh: SequenceMesh, tuning: Tuning) -> None:
    """ConfigError where exchanges cannot be captured; ``enable`` asks, ranks share the error."""
    # Exchanges by copy engines are kernels and copies, which a graph repeats as they are. With a
    # collective of NCCL in a graph destroy_process_group hangs: the joins run between two graphs.
    if not torch.cuda.is_available():
        raise ConfigError("cuda_graphs=True needs a GPU; use cuda_graphs=False")
    why = mesh.copy_engine_unavailable or p2p_disabled_reason()
    why = "tuning has copies=False" if tuning.copies is False else why
    if mesh.sp_degree > 1 and why is not None:
        raise ConfigError(
            f"cuda_graphs=True needs exchanges by copy engines, but {why}. With those of NCCL in a "
            "CUDA graph destroy_process_group would hang. Use cuda_graphs=False"
        )
    if mesh.sp_degree > 1 and single_hw_queue():
        raise ConfigError(
            "cuda_graphs=True with CUDA_DEVICE_MAX_CONNECTIONS=1: a CUDA graph may wait for itself "
            "where all streams share a queue. Unset the variable, or use cuda_graphs=False"
        )


def refuse_capture(name: str) -> None:
    """UnsupportedAttentionError in a CUDA graph of the caller's."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedAttentionError(
            f"a CUDA graph captures an enabled {name}, whose ranks compare their arguments in each "
            "forward pass: call it without the graph, and let enable(..., cuda_graphs=True) capture"
        )


def check_compiled(transformer: nn.Module, option: str) -> None:
    """UnsupportedAttentionError for a pass that ``torch.compile`` of the transformer has called,
    with an option of ``enable`` whose passes run outside of what is traced."""
    if is_called_compiled(transformer):
        raise UnsupportedAttentionError(
            f"torch.compile of a {type(transformer).__name__} with {option} has no "
            "effect: use its compile_repeated_blocks()"
        )


def is_called_compiled(transformer: nn.Module) -> bool:
    """Return whether ``torch.compile`` of the transformer has called what runs now."""
    frame = inspect.currentframe()
    while frame is not None:
        caller: Any = frame.f_locals.get("self")
        if type(caller).__name__ == "OptimizedModule" and caller._orig_mod is transformer:
            return True
        frame = frame.f_back
    return False


def check_device(name: str, device: torch.device) -> None:
    """ConfigError for weights that are not on the current GPU, which is captured."""
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        raise ConfigError(
            f"{name} with cuda_graphs=True is on {device}, the current device is "
            f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device, and move it there "
            "before its forward pass"
        )


def identities(transformer: nn.Module) -> Iterator[object]:
    """Yield what a captured pass depends on besides arguments, the same again if nothing was
    replaced: modules, their hooks, compiled forms and attention processors, addresses of weights
    and buffers."""
    for module in transformer.modules():
        attributes = vars(module)
        processor = attributes.get("processor")
        yield id(module), module.training, id(processor)
        yield getattr(processor, "_attention_backend", None)
        yield id(attributes.get("_compiled_call_impl")), id(attributes.get("forward"))
        yield (*module._forward_pre_hooks, None, *module._forward_hooks)
        for tensors in (module._parameters, module._buffers):
            for x in tensors.values():
                if x is not None:
                    yield type(x)
                    yield from _addresses(x)


def _addresses(x: Any) -> Iterator[int]:
    if is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _addresses(getattr(x, name))
    else:
        yield x.data_ptr()


# Note [what no graph repeats]
# A replay launches the kernels of one pass at their addresses and runs no Python. So whatever
# Python decides in each pass is refused: hooks, forward functions that offloading replaced,
# adapters that can be scaled or switched, the mask of padded text (its lengths are read on the
# host). What is constant until it is replaced is compared before each pass instead (`identities`):
# modules, processors, addresses of weights.
def check_modules(transformer: nn.Module, own_hooks: frozenset[int] = frozenset()) -> None:
    """UnsupportedAttentionError for what happens in or around modules and no graph would repeat.

    Args:
        own_hooks: the ids of hooks that a replay may leave out.
    """
    name = type(transformer).__name__
    for path, module in transformer.named_modules():
        why = _refusal(module, path == "", own_hooks)
        if why:
            raise UnsupportedAttentionError(
                f"{name} with cuda_graphs=True: {path or 'the transformer'} {why}. Or use "
                "cuda_graphs=False"
            )


def _refusal(module: nn.Module, is_root: bool, own_hooks: frozenset[int]) -> str:
    # Returns the reason, or "". Without `own_hooks` the transformer is not enabled yet.
    hooks = {*module._forward_pre_hooks, *module._forward_hooks} - own_hooks
    attributes = vars(module)
    if "_hf_hook" in attributes or ("forward" in attributes and not (is_root and own_hooks)):
        return "has a forward function of its own, as offloading and caches give it: remove it"
    compiled = attributes.get("_compiled_call_impl")
    if is_root and not isinstance(compiled, (BranchCalls, type(None))):
        return "is compiled as a whole, which has no effect: use compile_repeated_blocks()"
    if is_root and own_hooks and next(reversed(module._forward_pre_hooks)) not in own_hooks:
        return "has a hook that sees this rank's shard: register it before enable"
    if not is_root and hooks:
        return "has a hook of another library or yours, which a graph does not call: remove it"
    if is_adapter(module):
        return (
            "is a layer of PEFT, whose scale and choice of adapters a graph does not follow: "
            "fuse_lora() and unload_lora_weights() before enable"
        )
    for x in module._parameters.values():
        plain = x is None or type(x) is nn.Parameter or is_traceable_wrapper_subclass(x)
        if not plain:
            return f"has a weight of the type {type(x).__name__}, whose other tensors may move"
    return ""
