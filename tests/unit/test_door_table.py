"""Every public entry point, and what happens if its caller changes nothing else.

A new name, flag, setting or parameter with a token order fails here until it has its row: decide
what a caller gets who says no more than that. What a default order trains is tested in
tests/distributed/test_doors.py and where a row says.
"""

import importlib
import inspect
from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import megatron_patches
from ds_usp import TokenLayout

ROOT = Path(__file__).resolve().parents[2]

CALLER, LOADER = TokenLayout.CALLERS_KIND, TokenLayout.LOADERS_KIND

# What happens -> the names that it happens with.
Doors = dict[str, str]

NAMES: dict[str, Doors] = {
    "ds_usp": {
        "keeps the order of the caller's shards (contiguous); with a ring says once that the local "
        "attention is not called, and that causal work is unbalanced; reads mask, scale and "
        "dropout or refuses": "USPAttention",
        "has no default order, mask or mesh: without them a ConfigError": "usp_attention "
        "usp_joint_attention projected_attention USPSelfAttention TokenLayout",
        "takes the whole group as Ulysses ranks; no group: the default one; refuses what is no "
        "group of this rank": "SequenceMesh",
        "a value that changes nothing until a call gets it; checked when it is made": "MaskSpec "
        "Degrees RankGrid Scores Projection",
        "changes speed and memory, never the result": "Tuning allocator_variables",
        "counts, and changes nothing": "CommLedger",
        "settings of a program that shards the batch itself (zigzag)": "USPConfig",
        "is raised": "CheckpointError ConfigError DataError LayoutError MeshError PatchError "
        "RecomputeError USPError UnsupportedAttentionError",
        "is a text": "__version__",
    },
    "ds_usp.training": {
        "keeps the order that USPAttention takes by default (contiguous), shifts labels once and "
        "hands on its layout": "SequenceParallelDataLoader",
        "holds what was sharded, with its layout": "SequenceBatch ShardedBatch",
        "has no default order: the caller gives the layout": "shard_batch local_positions "
        "local_document_positions",
        "shifts labels of the whole sequence, once": "IGNORE_INDEX next_token_labels",
        "is of positions or borders that the caller gives": "RotaryPositions apply_rotary "
        "borders_of_positions document_borders document_positions rotary_frequencies "
        "rotate_projected",
        "counts all loss tokens, with the weights that the caller gives": "chunked_token_losses "
        "chunked_weighted_loss loss_token_weight mean_loss weighted_loss",
        "reduces gradients over all ranks that hold tokens; refuses configurations that would "
        "not": "GradientRule ParallelGroups check_zero_stage deepspeed_mpu "
        "global_gradient_norm gradient_rule initialize_deepspeed own_clipping owned_parameters "
        "prepare_deepspeed with_large_enough_buckets",
        "says which ranks read which samples": "DataParallelRanks data_parallel_ranks",
        "says what would be chosen, and changes nothing": "attention_kernel offload_ratio "
        "solved_ratio this_cluster",
        "changes memory and time, never the result": "StatesOnHost keep_states_on_host",
    },
    "ds_usp.profiling.exposed": {
        "traces one step, and writes nothing without a folder": "report",
        "reads traces; groups by their descriptions, else by what a call does": "read_traces",
        "holds what was traced": "CommunicationReport",
    },
    "ds_usp.memory": {
        "changes memory and time, never the result; refuses what it cannot repeat": "GemmLast "
        "LayerMemory Offload in_chunks keep_attention recompute_before run_for_gradients",
        "is the list of names": "RECOMPUTE",
    },
}

# Entry points with a parameter that is a token order by default: its name -> the default.
ORDERS = {
    # None is CALLER, compared with what a loader gave; tests/distributed/test_doors.py
    "ds_usp.USPAttention": None,
    "ds_usp.USPConfig": LOADER,
    "ds_usp.training.SequenceParallelDataLoader": CALLER,
    "apply('deepspeed')": None,
    # megatron-core's own batch slicing; tests/megatron/test_patched_megatron_core.py
    "apply('megatron_core')": "context_parallel",
    # the patches shard the batches; tests/megatron_deepspeed/test_mds_parity.py
    "apply('megatron_deepspeed')": LOADER,
    # Megatron-LM's own batch slicing; tests/megatron_lm
    "apply('megatron_lm')": "context_parallel",
}

FRAMEWORKS: dict[str, Doors] = {
    "deepspeed": {
        "the caller's shards, as DeepSpeed has them": "layout",
        "all ranks of the group: DeepSpeed's result to the bit": "ulysses_degree",
        "the fastest kernel that can": "kernel",
        "read from the local attention, or refused with a ring": "mask softmax_scale dropout_p",
        "modules that hold the old class are named by stale()": "also_in",
    },
    "megatron_core": {
        "the order in which megatron-core slices batches": "layout",
        "hierarchical_context_parallel_sizes, or all ranks": "ulysses_degree",
        "the fastest kernel that can": "kernel",
        "context parallel size 1 keeps megatron-core's attention": "everywhere",
    },
    "megatron_deepspeed": {
        "the patches shard the batches": "layout",
        "defaults of the added flags": "ulysses_degree kernel",
    },
    "megatron_lm": {
        "the order in which Megatron-LM slices batches; there is no other": "layout",
        "defaults of the added flags": "ulysses_degree kernel",
    },
}

FRAMEWORK_FLAGS: Doors = {
    "the patches shard batches, positions and loss mask by it": "--usp-layout",
    "one loss for all degrees and kernels, or refused": "--ulysses-degree --usp-kernel",
    "what auto plans for": "--usp-cluster",
    "memory and time, never the loss": "--usp-recompute --usp-offload-ratio --usp-loss-chunks "
    "--usp-mlp-chunks --usp-checkpoint-layers --usp-states-on-host",
    "less memory, never another loss; off": "--usp-projection-overlap",
    "nothing is traced": "--usp-report-communication",
    "removed: refused with the reason": "--usp-tp-shard-tokens",
}

MEGATRON_LM_FLAGS: Doors = {
    "one loss for all degrees and kernels, or refused": "--ulysses-degree --usp-kernel",
    "what auto plans for": "--usp-cluster",
    "memory and time, never the loss": "--usp-recompute --usp-mlp-chunks",
    "less memory, never another loss; off": "--usp-projection-overlap",
    "nothing is traced": "--usp-report-communication",
}

TRAINER_FLAGS: Doors = {
    "the trainer shards batches, positions and labels by it (zigzag)": "--usp-layout",
    "one loss for all degrees and kernels, or refused": "--ds-sequence-parallel-size "
    "--ulysses-degree --tensor-model-parallel-size --pipeline-model-parallel-size --zero-stage "
    "--usp-kernel",
    "what auto plans for": "--usp-cluster",
    "memory and time, never the loss": "--usp-recompute --usp-offload-ratio --usp-loss-chunks "
    "--usp-mlp-chunks --usp-checkpoint-layers --usp-states-on-host",
    "the model: the same function for all degrees": "--num-layers --hidden-size "
    "--ffn-hidden-size --num-attention-heads --num-key-value-heads --max-position-embeddings "
    "--vocab-size --make-vocab-size-divisible-by --normalization --layernorm-epsilon --swiglu "
    "--no-swiglu --use-rotary-position-embeddings --no-use-rotary-position-embeddings "
    "--window-size --rotary-base --untie-embeddings-and-output-weights "
    "--no-untie-embeddings-and-output-weights --disable-bias-linear --no-disable-bias-linear "
    "--init-method-std --attention-dropout --hidden-dropout --bf16 --no-bf16",
    "whose linear layers and norms: TransformerEngine's where it can": "--transformer-impl",
    "removed: refused with the reason": "--usp-tp-shard-tokens",
    "less memory, never another loss; off": "--usp-projection-overlap",
    "the whole sequences, before they are sharded": "--data-path --data-cache-path --split "
    "--seq-length --micro-batch-size --global-batch-size --eod-mask-loss --no-eod-mask-loss "
    "--reset-attention-mask --no-reset-attention-mask --reset-position-ids "
    "--no-reset-position-ids --seed",
    "the optimizer, on gradients that all ranks have summed": "--optimizer --lr --min-lr "
    "--lr-decay-style --lr-decay-iters --lr-warmup-iters --weight-decay --clip-grad --adam-beta1 "
    "--adam-beta2 --adam-eps --sgd-momentum --train-iters",
    "when it stops, saves, evaluates and what it writes; refuses to overwrite": "--save "
    "--save-interval --load --output-dir --overwrite-output --eval-interval --eval-iters "
    "--log-interval --exit-interval --exit-duration-in-mins --quiet --tensorboard-dir "
    "--wandb-exp-name --wandb-project --wandb-save-dir --check-for-nan-in-loss-and-grad "
    "--no-check-for-nan-in-loss-and-grad",
    "nothing is trained": "--check-only --help -h",
    "nothing is traced": "--usp-report-communication",
    "how it is started": "--device --num-processes --local-rank --local_rank --quickstart",
}

SETTINGS: Doors = {
    "the program shards batches by it (zigzag)": "usp_layout",
    "one loss for all degrees and kernels, or refused": "sp_size ulysses_degree mp_size pp_size "
    "zero_stage usp_kernel",
    "what auto plans for": "usp_cluster",
    "memory and time, never the loss": "activation_checkpoint",
    "the model": "model_size num_layers hidden_size num_attn_heads num_kv_heads init_std rotary "
    "rope_theta vocab_size precision",
    "the whole sequences, before they are sharded": "seq_length global_batch_size batch_size "
    "data_path split tokenizer_type vocab_path merge_path tokenizer_model num_workers seed",
    "the optimizer": "lr min_lr clip_grad weight_decay train_tokens_in_billion train_iters "
    "lr_warmup_tokens_in_million lr_warmup_iters lr_decay_tokens_in_billion lr_decay_iters "
    "lr_decay_style",
    "when it stops, saves, evaluates and what it writes": "log_interval eval_iters eval_interval "
    "save_interval output_home exit_interval exit_duration_in_mins tensorboard_dir "
    "wandb_project wandb_exp_name wandb_save_dir",
    "where it runs": "device num_gpus launcher hostfile nnodes node_rank master_addr master_port "
    "usp_framework megatron_deepspeed_path megatron_lm_path dry_run",
    "whose linear layers and norms Megatron-LM takes: TransformerEngine's where there are some": ""
    "transformer_impl",
}


def same(actual_names: Iterable[str], doors: Doors, where: str) -> None:
    """Every name has one row, and every row its names."""
    rows = [name for names in doors.values() for name in names.split()]
    names = set(actual_names)
    missing, gone = sorted(names - set(rows)), sorted(set(rows) - names)
    assert not missing, f"{where}: say what happens with {missing} if nothing else is changed"
    assert not gone, f"{where}: there is no {gone} any more"
    assert len(rows) == len(set(rows)), f"{where}: a name has two rows"


def test_every_public_name_has_a_row():
    for module, doors in NAMES.items():
        same(importlib.import_module(module).__all__, doors, module)


def test_every_setting_of_a_framework_has_a_row():
    assert set(megatron_patches.frameworks()) == set(FRAMEWORKS)
    for framework, doors in FRAMEWORKS.items():
        same(
            (field.name for field in fields(settings_of(framework))), doors, f"apply({framework!r})"
        )


def settings_of(framework: str) -> type:
    """The class whose fields are what ``apply(host, ...)`` takes."""
    settings_type: type = importlib.import_module(f"megatron_patches.{framework}").Settings
    return settings_type


@pytest.mark.parametrize(
    ("framework", "doors"),
    [("megatron_deepspeed", FRAMEWORK_FLAGS), ("megatron_lm", MEGATRON_LM_FLAGS)],
)
def test_every_flag_of_a_patched_framework_has_a_row(framework, doors):
    arguments = importlib.import_module(f"megatron_patches.{framework}.arguments")
    parser = ArgumentParser(add_help=False)
    parser.set_defaults(cp_comm_type=["p2p"])
    arguments.add_flags(parser, settings_of(framework)())
    same(flags_of(parser), doors, framework)


def test_every_flag_of_the_trainer_has_a_row():
    from usp_trainer.arguments import build_parser

    same(flags_of(build_parser()), TRAINER_FLAGS, "the trainer")


def flags_of(parser: ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


def test_every_setting_of_the_scripts_has_a_row():
    from launch_settings import DEFAULTS

    same(DEFAULTS, SETTINGS, "launch_settings.py")


def default_of(entry: Any, name: str) -> Any:
    """The default of a parameter; ``Parameter.empty`` where there is none."""
    if not callable(entry) or (isinstance(entry, type) and issubclass(entry, Exception)):
        return inspect.Parameter.empty
    known = inspect.signature(entry).parameters
    return known[name].default if name in known else inspect.Parameter.empty


def test_one_rule_gives_the_default_order():
    orders = {}
    for module in NAMES:
        public = importlib.import_module(module)
        for name in public.__all__:
            default = default_of(getattr(public, name), "layout")
            if default is not inspect.Parameter.empty:
                orders[f"{module}.{name}"] = default
    for framework in FRAMEWORKS:
        orders[f"apply({framework!r})"] = settings_of(framework)().layout
    assert orders == ORDERS
    assert (CALLER, LOADER) == ("contiguous", "zigzag")
