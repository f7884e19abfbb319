"""Refusals of Megatron-DeepSpeed's options, as far as they need no checkout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import ds_usp
from ds_usp.errors import ConfigError
from megatron_patches.megatron_deepspeed.arguments import _choose_flash
from megatron_patches.megatron_deepspeed.unsupported import refuse_framework_failures

PLAIN = {
    "checkpoint_activations": False,
    "checkpoint_in_cpu": False,
    "contigious_checkpointing": False,
    "deepspeed_activation_checkpointing": False,
    "cpu_optimizer": False,
    "cpu_torch_adam": False,
    "distribute_checkpointed_activations": False,
    "distribute_saved_activations": False,
    "init_method_xavier_uniform": False,
    "lazy_mpu_init": None,
    "log_optimizer_states_to_tensorboard": False,
    "log_params_norm": False,
    "no_pipeline_parallel": True,
    "optimizer": "sgd",
    "partition_activations": False,
    "tensor_model_parallel_size": 4,
}
CHECKPOINT = {"checkpoint_activations": True, "deepspeed_activation_checkpointing": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distribute_saved_activations": True}, "parallel 4.*--usp-offload-ratio 1"),
        ({"distribute_checkpointed_activations": True}, "whole length.*--usp-offload-ratio 1"),
        ({"init_method_xavier_uniform": True}, "--init-method-std"),
        ({"cpu_optimizer": True, "cpu_torch_adam": True}, "offload the optimizer"),
        ({"log_params_norm": True}, "--log-params-norm.*Leave it out"),
        ({"lazy_mpu_init": True}, "--lazy-mpu-init.*Leave it out"),
        ({"log_optimizer_states_to_tensorboard": True}, "--optimizer is sgd"),
        ({"checkpoint_activations": True}, "Add --deepspeed-activation-checkpointing"),
        ({**CHECKPOINT, "partition_activations": True}, "leave out --no-pipeline-parallel"),
        ({**CHECKPOINT, "contigious_checkpointing": True}, "--partition-activations alone"),
    ],
)
def test_an_option_that_fails_in_the_framework_is_refused_with_the_fix(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_framework_failures(SimpleNamespace(**{**PLAIN, **options}))


@pytest.mark.parametrize(
    "options",
    [
        {},
        CHECKPOINT,
        {"checkpoint_activations": True, "no_pipeline_parallel": False},
        {**CHECKPOINT, "partition_activations": True, "no_pipeline_parallel": False},
        {"log_optimizer_states_to_tensorboard": True, "optimizer": "adam"},
    ],
)
def test_options_that_work_are_not_refused(options: dict[str, Any]) -> None:
    refuse_framework_failures(SimpleNamespace(**{**PLAIN, **options}))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unused_flash_attention_is_printed_on_rank_0(
    rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("v1", "v2", "triton", "builder")
    config = ds_usp.USPConfig(sp_degree=2, ulysses_degree=1)
    for installed, why in ((None, "flash-attn is not installed"), (object(), "a ring of 2")):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=installed: found)
        args = SimpleNamespace(rank=rank, **{f"use_flash_attn_{name}": False for name in names})
        _choose_flash(args, config)
        assert not capsys.readouterr().out
        args.use_flash_attn_v2 = True
        _choose_flash(args, config)
        printed = capsys.readouterr().out
        assert not args.use_flash_attn_v2
        assert (f"--use-flash-attn-v2: not used, because {why}" in printed or why in printed) == (
            not rank
        )
