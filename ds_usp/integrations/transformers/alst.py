"""Scripts for DeepSpeed's ALST on ulysses x ring: its two classes, under its names.

A script of ALST (https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism) registers
attention, shards its batches by a data loader adapter, computes a loss of its shard from
``outputs.logits`` and ``shift_labels``, and weighs the ranks' losses by their loss tokens in a
differentiable ``all_gather``. Here the model joins the token ids of the shards, a few bytes each,
and is a model of :func:`enable`.

Gradients: that loss code makes the *mean* over the ranks of a sequence the gradient. ZeRO-3 takes
that mean; ZeRO-0 to 2 sum over them (DeepSpeed 0.19.8), so here gradients are divided there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_usp.comm.keywords import explain_keywords
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.config import environment
from ds_usp.errors import ConfigError, DataError, LayoutError, warn_once
from ds_usp.geometry.degrees import Degrees
from ds_usp.geometry.layout import KINDS, TokenLayout
from ds_usp.geometry.ranks import RankGrid
from ds_usp.integrations.transformers.model import EnabledModel, enable
from ds_usp.integrations.transformers.refusals import check_model, check_version, find_model
from ds_usp.integrations.transformers.whole_arguments import AUTO_LAYOUT, TOKEN_DIM
from ds_usp.integrations.transformers.whole_batch_loss import WholeBatchLoss
from ds_usp.lowlevel import refuse_second_derivative
from ds_usp.settings import setting
from ds_usp.training.data_loader import BatchBroadcast
from ds_usp.training.whole_batch import IGNORE_INDEX, next_token_labels


def _token_dim(name: str, x: Any) -> int | None:
    """The dim along which an argument of a batch is sharded; None: it is the same on all ranks."""
    if not isinstance(x, Tensor) or x.ndim < 2:
        return None
    if name == "attention_mask":
        return 1 if x.ndim == 2 else None
    return TOKEN_DIM.get(name)


class UlyssesSPAttentionHF:
    """Replaces ``deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF``."""

    ulysses_degree: int | None = None
    layout: str = AUTO_LAYOUT

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
        *,
        ulysses_degree: int | None = None,
        layout: str | None = None,
    ) -> Any:
        """Shard the model that DeepSpeed's engine will run over groups of so many ranks.

        The signature and the result are DeepSpeed 0.19.8's; collective over the world. The model
        is enabled at the engine's first forward pass, under the engine's ZeRO stage.

        Args:
            model_name_or_path: a model, or the name of one that is made later: then the model of
                the first engine that is given the ``mpu``.
            core_attn_implementation: what the model would run without a mesh (``sdpa``).
            sequence_parallel_size: ranks that share a sequence; 1: nothing is done.
            micro_batch_size, seq_length, seq_length_is_variable, max_length: any batch is served.
            disable_in_eval: let every rank evaluate its own batch alone.
            ulysses_degree: ranks that exchange heads; the ring takes the rest. None: all.
            layout: a kind of token layout but ``balanced``. ``auto``: ``contiguous``, and
                ``zigzag`` on a ring.

        Returns:
            The ``mpu`` for ``deepspeed.initialize``; None for one rank.

        Raises:
            ConfigError: another version of transformers, another size than was registered before.
            UnsupportedAttentionError: a model that is not served.
            LayoutError: an unknown layout, or ``balanced``.
        """
        if sequence_parallel_size == 1:
            return None
        check_version()
        layout = layout or cls.layout
        if layout not in (AUTO_LAYOUT, *KINDS) or layout == "balanced":
            kinds = ", ".join(kind for kind in KINDS if kind != "balanced")
            raise LayoutError(
                f"layout={layout!r} must be auto or one of {kinds}: shards alone do not show the "
                "documents that a balanced layout is made from"
            )
        model = None if isinstance(model_name_or_path, str) else find_model(model_name_or_path)
        if model is not None:
            check_model(model)
        mpu = _sequence_parallel_groups(sequence_parallel_size)
        group = mpu.get_sequence_parallel_group()
        mesh = SequenceMesh.from_group(group, ulysses_degree or cls.ulysses_degree)
        if layout == AUTO_LAYOUT:
            layout = "contiguous" if mesh.ring_degree == 1 else "zigzag"
        implementation = core_attn_implementation
        if model is not None:
            implementation = model.config._attn_implementation
        registration = _Registration(mesh, layout, disable_in_eval, mpu, implementation)
        if group in REGISTRATIONS:
            REGISTRATIONS[group].remove()
        REGISTRATIONS[group] = registration
        return mpu

    @classmethod
    def unregister_from_transformers(cls, core_attn_implementation: str = "") -> None:
        """Leave the models as they were, and release DeepSpeed's sequence-parallel groups."""
        import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
        from deepspeed.utils import groups

        for registration in list(REGISTRATIONS.values()):
            registration.remove()
        REGISTRATIONS.clear()
        mpu._SEQUENCE_PARALLEL_GROUP = mpu._SEQUENCE_DATA_PARALLEL_GROUP = None
        if groups.mpu is mpu:  # which later engines without an mpu would take
            groups.mpu = None


def _sequence_parallel_groups(size: int) -> Any:
    """Return DeepSpeed's ``mpu`` with groups of ``size`` ranks, made if it has none. Collective."""
    import deepspeed.comm
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

    if not deepspeed.comm.is_initialized():
        raise ConfigError("call deepspeed.init_distributed() before register_with_transformers")
    if dist.get_world_size() % size:
        raise ConfigError(
            f"sequence_parallel_size={size} does not divide the {dist.get_world_size()} ranks"
        )
    if mpu._SEQUENCE_PARALLEL_GROUP is None:
        mpu.initialize_sequence_parallel(sequence_parallel_size=size)
    current = mpu.get_sequence_parallel_world_size()
    if current != size:
        raise ConfigError(
            f"sequence_parallel_size={size}, and DeepSpeed has groups of {current} ranks already: "
            "call UlyssesSPAttentionHF.unregister_from_transformers() before another size"
        )
    return mpu


class _Registration:
    """Holds what was registered for the ranks of one sequence-parallel group, and from its engine's
    first forward pass on the engine's model, which is given shards and returns shards."""

    def __init__(
        self, mesh: SequenceMesh, layout: str, disable_in_eval: bool, mpu: Any, implementation: str
    ) -> None:
        self.mesh, self.layout_kind, self._mpu = mesh, layout, mpu
        self._disable_in_eval = disable_in_eval
        self._model: Any = None
        self._reduction: Any = None  # "mean" or "sum", what the engine does with gradients
        self._enabled: EnabledModel | None = None
        self._handles: list[RemovableHandle] = []
        # Until the engine runs, the attention that an unsharded model would run is refused: a model
        # that is not in the engine would compute its shard as if it were a sequence.
        self._implementation = implementation
        self._original = ALL_ATTENTION_FUNCTIONS._local_mapping.get(implementation)
        ALL_ATTENTION_FUNCTIONS[implementation] = self._refuse_attention
        # A hook of all modules.
        self._waiting: RemovableHandle | None = register_module_forward_pre_hook(self._find_engine)

    def layout(self, seq_len: int) -> TokenLayout:
        return self.mesh.layout(self.layout_kind, seq_len)

    def remove(self) -> None:
        self._stop_waiting()
        if self._model is not None:
            self._model.__dict__.pop("train", None)
            self._disable()

    def _refuse_attention(self, module: nn.Module, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"{type(module).__name__} runs before, or outside of, the engine that "
            "deepspeed.initialize makes of the registered mpu: call the engine (pass "
            "mpu=mpu to deepspeed.initialize), or use ds_usp.integrations.transformers.enable"
        )

    def _find_engine(self, module: nn.Module, _: Any) -> None:
        is_engine = hasattr(module, "zero_optimization_stage")
        if not is_engine or getattr(module, "mpu", None) is not self._mpu:
            return
        self._stop_waiting()
        self._model, self._reduction = module.module, _reduction_of(module)
        self._enable()
        if self._disable_in_eval:
            self._follow_mode()

    def _stop_waiting(self) -> None:
        if self._waiting is None:
            return
        self._waiting.remove()
        self._waiting = None
        del ALL_ATTENTION_FUNCTIONS[self._implementation]
        if self._original is not None:
            ALL_ATTENTION_FUNCTIONS[self._implementation] = self._original

    def _enable(self) -> None:
        self._enabled = enable(
            self._model,
            self.mesh,
            layout=self.layout_kind,
            gradients=self._reduction,
            logits="shard",
        )
        if self._enabled._loss is not None:
            find_model(self._model).loss_function = ShardLoss(self._enabled._loss)
        # Around the hooks of enable, which takes whole batches: one joins the shards before, one
        # sets the gradients of what a script makes its loss from.
        self._handles = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            self._model.register_forward_hook(self._after),
        ]

    def _disable(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._enabled is not None:
            self._enabled.disable()
        self._enabled = None

    def _follow_mode(self) -> None:
        # Trainers evaluate on other batches on every rank; all call eval and train: a collective.
        train = self._model.train

        def train_and_follow(mode: bool = True) -> nn.Module:
            train(mode)
            self._set_mode(mode)
            return self._model

        self._model.train = train_and_follow
        self._set_mode(self._model.training)

    def _set_mode(self, training: bool) -> None:
        if training == (self._enabled is not None):
            return
        if training:
            self._enable()
        else:
            self._disable()

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A script of ALST gives shards, and enable takes whole batches: documents that end in
        # another rank's shard are seen nowhere else. Token ids are a few bytes, so they are joined.
        names = cast(EnabledModel, self._enabled)._parameters  # hooks are removed with it
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = {name: x for name, x in arguments.items() if x is not None}
        tokens = arguments.get("input_ids")
        if tokens is None:
            raise DataError("a sharded batch needs input_ids; inputs_embeds are not joined")
        layout = self._layout_of(tokens.shape[1])
        whole = {name: self._join(name, x, layout, tokens) for name, x in arguments.items()}
        targets = whole.pop("shift_labels", None)
        if whole.pop("labels", None) is None or targets is None:
            return (), whole  # the script computes its loss from the logits
        # As ALST's adapter gives them, the labels are the shifted ones.
        whole["labels"] = nn.functional.pad(targets[:, :-1], (1, 0), value=IGNORE_INDEX)
        whole["shift_labels"] = targets
        return (), whole

    def _layout_of(self, shard_length: int) -> TokenLayout:
        """Return the layout of the ranks' shards; LayoutError for other lengths. Collective."""
        group: Any = self.mesh.sp_group
        packed = all_gather_bytes(shard_length.to_bytes(8, "little"), group)
        lengths = [int.from_bytes(x, "little") for x in packed]
        layout = self.layout(sum(lengths))
        expected = [layout.length(rank) for rank in range(self.mesh.sp_degree)]
        if lengths != expected:
            raise LayoutError(
                f"the ranks were given {lengths} tokens, {layout.kind} shards of {sum(lengths)} "
                f"are {expected}: shard batches by UlyssesSPDataLoaderAdapter"
            )
        return layout

    def _join(self, name: str, x: Any, layout: TokenLayout, tokens: Tensor) -> Any:
        """Return an argument of all ranks' tokens; one without tokens as it is. Collective."""
        dim = _token_dim(name, x)
        if dim is None:
            return x
        if x.shape[dim] != tokens.shape[1]:
            raise LayoutError(
                f"{name} {list(x.shape)} has other tokens than input_ids {list(tokens.shape)}"
            )
        return self.mesh.gather(x, layout, dim)

    def _after(self, _: nn.Module, __: Any, out: Any) -> Any:
        shard = self._enabled._running.shard if self._enabled else None
        length = -1 if shard is None else shard.length
        if self._reduction == "sum":
            for name in [name for name in out if name != "loss"]:
                out[name] = scale_gradients(out[name], length, 1 / self.mesh.sp_degree)
        if out.get("loss") is not None:
            out["loss"] = ChangedGradient.apply(out["loss"], partial(_mean_over_ranks, self.mesh))
        return out


REGISTRATIONS: WeakKeyDictionary[dist.ProcessGroup, _Registration] = WeakKeyDictionary()


def _reduction_of(engine: Any) -> Any:
    """Return whether an engine sums or averages the gradients of a sequence's ranks."""
    if engine.zero_optimization_stage() < 3:
        return "sum"
    if not engine.zero_reduce_scatter():
        raise ConfigError(
            "ZeRO-3 with reduce_scatter=false averages some gradients over the ranks of a "
            "sequence and sums others (DeepSpeed 0.19.8): leave reduce_scatter out"
        )
    return "mean"


class ShardLoss:
    """``model.loss_function`` for scripts, which call it with logits and labels of a shard."""

    def __init__(self, whole: WholeBatchLoss) -> None:
        self._whole = whole

    def __call__(self, logits: Any, labels: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Shapes: logits ``[b, s_local, v]``; a scalar, 0 of a shard without loss tokens."""
        inside = self._whole.running.targets is not None  # the model calls it in its forward pass
        loss = self._whole(logits, labels, *args, **kwargs)
        targets = kwargs.get("shift_labels", labels)
        if inside or targets is None:
            return loss
        # Its weight is 0 in a script, and 0 times the nan of a mean of nothing is nan.
        return torch.where((targets != IGNORE_INDEX).any(), loss, torch.zeros_like(loss))


def scale_gradients(value: Any, length: int, factor: float) -> Any:
    """Return an output as it is, in which tensors ``[b, length, ...]`` have scaled gradients."""
    if isinstance(value, tuple):
        return tuple(scale_gradients(x, length, factor) for x in value)
    if isinstance(value, Tensor) and value.ndim >= 3 and value.shape[1] == length:
        return ChangedGradient.apply(value, lambda grad: grad * factor)
    return value


class ChangedGradient(torch.autograd.Function):
    """A tensor as it is, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.change(grad), None


def _mean_over_ranks(mesh: SequenceMesh, grad: Tensor) -> Tensor:
    """The mean of the ranks' gradients of a loss that all have; in backward, and collective."""
    # A script's weights add up to 1, and leave the loss's value. In a differentiable all-gather the
    # gradient of rank r's loss is sp_degree times its weight, without one 1: the mean is 1.
    refuse_second_derivative("the loss of a whole batch")
    grad = grad.clone()
    mesh.agree("the gradient of the whole batch's loss")
    dist.all_reduce(grad, group=mesh.sp_group)
    return grad / mesh.sp_degree


class UlyssesSPDataLoaderAdapter:
    """Replaces DeepSpeed's adapter: it yields every rank's batch in turn, sharded over all ranks.

    Each rank of a sequence-parallel group reads its own batches. Shards are on the CPU, with
    ``shift_labels`` for ``labels``. A pass ends with the rank that ends first. Collective at every
    ``sp_world_size``-th batch.

    Args:
        dl: a loader of dicts of whole sequences: ``input_ids [b, tokens]``, ``labels``, and
            ``position_ids`` that start anew in packed documents; any length, padded or not.
        sp_rank, sp_group, sp_world_size: of this rank, as the ``mpu`` gives them.
        device: whence the ranks exchange batches; not used.

    Raises:
        ConfigError: the group is not registered.
        DataError, LayoutError: on every rank of the group, a batch that cannot be sharded.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any):
        registration = REGISTRATIONS.get(sp_group)
        if registration is None:
            raise ConfigError(
                "no model was registered for this group: call "
                "UlyssesSPAttentionHF.register_with_transformers of this package first"
            )
        self._registration = registration
        self.dl, self.sp_rank, self.sp_group = dl, sp_rank, sp_group
        self.sp_world_size, self.device = sp_world_size, device
        self._broadcast = BatchBroadcast(sp_group, "cpu")
        self.iter: Iterator[Any] = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Exchange the next batch of every rank; StopIteration where a rank has none left."""
        reads = [
            self._broadcast.next_of(self.iter if source == self.sp_rank else None, source)
            for source in range(self.sp_world_size)
        ]
        batches = [read[0] for read in reads if read is not None]
        if len(batches) < len(reads):
            if batches:
                warn_once(
                    f"{reads.count(None)} of {self.sp_world_size} ranks have no batch left: "
                    "those of the others are dropped. Give all ranks as many batches",
                    rank=dist.get_rank(),
                )
            self.iter = iter(self.dl)
            raise StopIteration
        self.micro_batches.extend(self._shard(batch) for batch in batches)

    def _shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's shard of a batch of whole sequences."""
        batch = dict(batch)  # of a group of one rank it is the loader's own
        if "input_ids" not in batch:
            raise DataError(f"a batch needs input_ids; it has {', '.join(batch)}")
        seq_len = batch["input_ids"].shape[1]
        layout = self._registration.layout(seq_len)
        if batch.get("position_ids") is None and "attention_mask" not in batch:
            rows = len(batch["input_ids"])
            batch["position_ids"] = torch.arange(seq_len).expand(rows, -1)
        labels = batch.pop("labels", None)
        if labels is not None and batch.get("shift_labels") is None:
            batch["shift_labels"] = next_token_labels(labels)
        return {
            name: x if (dim := _token_dim(name, x)) is None else layout.shard(x, dim, self.sp_rank)
            for name, x in batch.items()
        }


@explain_keywords
def patch_accelerate(
    ulysses_degree: int | None = None, layout: str = AUTO_LAYOUT
) -> PatchedAccelerate:
    """Let Accelerate's ``ParallelismConfig(sp_size=N, sp_backend="deepspeed")`` run on a mesh.

    Two lines in a script of Accelerate, Trainer or TRL, before ``Accelerator`` or the trainer
    prepares its model; the rest of it, and ``accelerate launch``, stay as they are::

        from ds_usp.integrations.transformers import patch_accelerate
        patch_accelerate(ulysses_degree=2)

    Evaluation runs without sharding, each rank its own batches, as Accelerate wants it. Trainer's
    micro batches are weighed by their loss tokens; its label smoothing and ``compute_loss_func``,
    which transformers leaves out of this loss, are a ConfigError in the first step.

    Args:
        ulysses_degree, layout: see :meth:`UlyssesSPAttentionHF.register_with_transformers`.

    Returns:
        What restores DeepSpeed's own classes: ``restore()``, or the end of a ``with``.

    Raises:
        ConfigError: it was called before and not restored, or a degree that does not divide the
            ranks that torchrun has started.
    """
    # Of the ranks that sp_size says, which is known later and divides all that were started.
    world = int(environment(("WORLD_SIZE",)).get("WORLD_SIZE", 1))
    if ulysses_degree is not None and (world > 1 or not isinstance(ulysses_degree, int)):
        setting("ulysses_degree").check(ulysses_degree, "transformers")
        Degrees(sp=world, ulysses=ulysses_degree).check()
    return PatchedAccelerate(ulysses_degree, layout)


class PatchedAccelerate(AbstractContextManager["PatchedAccelerate"]):
    """DeepSpeed's two classes of ALST, replaced where Accelerate imports them, and what Trainer
    leaves out of its loss there."""

    def __init__(self, ulysses_degree: int | None, layout: str) -> None:
        import deepspeed.runtime.sequence_parallel.ulysses_sp as stock
        import transformers  # its trainer takes seconds to import

        if issubclass(stock.UlyssesSPAttentionHF, UlyssesSPAttentionHF):
            raise ConfigError("Accelerate is patched already: restore() it before another degree")
        self._stock = stock
        self._originals = stock.UlyssesSPAttentionHF, stock.UlyssesSPDataLoaderAdapter
        stock.UlyssesSPAttentionHF = type(
            "UlyssesSPAttentionHF",
            (UlyssesSPAttentionHF,),
            {"ulysses_degree": ulysses_degree, "layout": layout},
        )
        stock.UlyssesSPDataLoaderAdapter = UlyssesSPDataLoaderAdapter
        self._trainer = transformers.Trainer
        self._methods = self._trainer.get_batch_samples, self._trainer.compute_loss
        self._trainer.get_batch_samples = _with_weights(self._trainer.get_batch_samples)
        self._trainer.compute_loss = _weighted(self._trainer.compute_loss)

    def restore(self) -> None:
        """Put DeepSpeed's own classes back; models that run keep the classes they have."""
        self._stock.UlyssesSPAttentionHF, self._stock.UlyssesSPDataLoaderAdapter = self._originals
        self._trainer.get_batch_samples, self._trainer.compute_loss = self._methods

    def __exit__(self, *_: object) -> None:
        self.restore()


# Of each trainer: what the micro batches of this step weigh in the mean over its loss tokens.
_WEIGHTS: WeakKeyDictionary[Any, Iterator[Tensor]] = WeakKeyDictionary()


def _sequence_parallel_size(trainer: Any) -> int:
    parallel: Any = getattr(trainer.accelerator, "parallelism_config", None)
    return parallel.sp_size if parallel and parallel.sp_backend == "deepspeed" else 1


def _with_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Trainer.get_batch_samples``, which finds no ``labels`` in shards and would take the
    mean of the micro batches' means: what each weighs by its loss tokens goes to ``_WEIGHTS``. Once
    a step, collective over the mesh, and with ``average_tokens_across_devices`` over the world."""

    @wraps(original)
    def get_batch_samples(trainer: Any, iterator: Any, count: int, device: Any) -> Any:
        samples, items = original(trainer, iterator, count, device)
        size = _sequence_parallel_size(trainer)
        if size > 1 and samples and "shift_labels" in samples[0]:
            from deepspeed.utils import groups

            tokens = [(sample["shift_labels"] != IGNORE_INDEX).sum() for sample in samples]
            counts = torch.stack(tokens).to(device)
            dist.all_reduce(counts, group=groups._get_sequence_parallel_group())
            whole, meshes = counts.sum(), 1
            if trainer.args.average_tokens_across_devices:
                meshes = dist.get_world_size() // size
                dist.all_reduce(whole)  # each mesh's once for each of its ranks
                whole = whole // size
            _WEIGHTS[trainer] = iter(counts * (len(samples) * meshes) / whole.clamp(min=1))
        return samples, items

    return get_batch_samples


def _weighted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Trainer.compute_loss``, which over shards takes the model's loss, whatever a Trainer's
    arguments: refuse others, and weigh the loss by ``_WEIGHTS``."""

    @wraps(original)
    def compute_loss(
        trainer: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        size = _sequence_parallel_size(trainer)
        if size == 1 or not trainer.model.training:
            return original(trainer, model, inputs, return_outputs, **kwargs)
        for name in ("label_smoother", "compute_loss_func"):
            if getattr(trainer, name) is not None:
                raise ConfigError(
                    f"Trainer with sp_size={size} leaves its {name} out of the loss: "
                    "train without it, or use attach(trainer, mesh), with which it is computed"
                )
        loss, outputs = original(trainer, model, inputs, True, **kwargs)
        loss = loss * next(_WEIGHTS.get(trainer, iter(())), 1)  # none: a loss outside of a step
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def sequence_mesh(parallelism_config: Any, ulysses_degree: int | None = None) -> SequenceMesh:
    """The mesh of Accelerate's sizes: ``cp_size`` or ``sp_size`` consecutive ranks.

    For :func:`enable` with :func:`attach` or :func:`share_batches`. Collective over the world. Do
    not give the configuration to an ``Accelerator`` or a trainer too, which would share sequences
    in its own way.

    Args:
        parallelism_config: ``accelerate.ParallelismConfig``.
        ulysses_degree: ranks that exchange heads; the ring takes the rest. None: all.

    Raises:
        ConfigError: tensor parallelism, or sizes that do not divide the world.
    """
    if parallelism_config.tp_size > 1:
        raise ConfigError(
            f"tp_size={parallelism_config.tp_size}: models that are split by tensor parallelism "
            "are not served"
        )
    size = parallelism_config.cp_size * parallelism_config.sp_size
    degree = size if ulysses_degree is None else ulysses_degree
    world = dist.get_world_size()
    if size % degree or world % size:
        raise ConfigError(
            f"ulysses_degree={degree} must divide the {size} ranks of a sequence (cp_size x "
            f"sp_size), and they the world of {world}"
        )
    sizes = {"ulysses": degree, "ring": size // degree, "dp": world // size}
    return SequenceMesh.build(RankGrid(sizes))
