"""Unedited trainers with Accelerate's ParallelismConfig(sp_size), against one process."""

import functools
import tempfile
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from harness import RankContext, WorkerPool
from hf_trainer_runs import Record, restored_environment, tiny_model, tokenizer

from ds_usp.errors import ConfigError
from ds_usp.integrations.transformers import (
    UlyssesSPAttentionHF,
    alst,
    patch_accelerate,
    sequence_mesh,
)
from ds_usp.training import prepare_deepspeed


class Rows(torch.utils.data.Dataset):
    """Rows of 35 tokens, which 4 ranks do not divide, of two documents each; every second one has
    few labels, so that micro batches of a step weigh unlike."""

    def __init__(self, count: int = 16) -> None:
        self.ids = torch.randint(3, 97, (count, 35), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = 5 + index
        positions = torch.cat([torch.arange(start), torch.arange(35 - start)])
        unlabelled = torch.arange(35) < 25 * (index % 2)
        labels = self.ids[index].masked_fill(unlabelled | (positions == 0), -100)
        return {"input_ids": self.ids[index], "position_ids": positions, "labels": labels}


def test_accelerate_has_the_backend_of_deepspeed_alone():
    """``patch_accelerate`` replaces DeepSpeed's classes, and Accelerate 1.15.0, the newest release,
    has no other backend. The first one with huggingface/accelerate#4209 has."""
    import accelerate

    try:
        accelerate.ParallelismConfig(sp_size=2, sp_backend="torch")
    except ValueError as refusal:
        assert "['deepspeed']" in str(refusal)  # the list of them
    else:
        pytest.fail(
            f"accelerate {accelerate.__version__} has sp_backend='torch' (its pull request 4209), "
            "which patch_accelerate does not replace: let it, or let it refuse that backend"
        )


def arguments_of(sp: int, stage: int | None) -> dict[str, Any]:
    from accelerate import ParallelismConfig

    engine: dict[str, Any] = {}
    if stage is not None:
        import deepspeed.comm

        prepare_deepspeed()
        deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
        engine["deepspeed"] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.5,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine["parallelism_config"] = ParallelismConfig(sp_size=sp, sp_backend="deepspeed")
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "average_tokens_across_devices": False,
        "include_num_input_tokens_seen": "all",
        **engine,
    }


def train(ctx: RankContext, sp: int = 1, degree: int | None = None, **options: Any) -> Any:
    stage = options.pop("stage", None)
    sft = options.pop("sft", False)
    with restored_environment():
        arguments = {**arguments_of(sp, stage), **options}
        patched = patch_accelerate(degree) if sp > 1 else None
        try:
            record = Record()
            trainer = (sft_trainer if sft else packed_trainer)(arguments, record)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
            steps = [log for log in record.logs if "grad_norm" in log]
            return {
                "losses": [log["loss"] for log in steps],
                "norms": [log["grad_norm"] for log in steps],
                "tokens": trainer.state.num_input_tokens_seen,
                "evaluation": trainer.evaluate()["eval_loss"] if not sft else 0.0,
            }
        finally:
            if patched is not None:
                patched.restore()
                UlyssesSPAttentionHF.unregister_from_transformers()


def packed_trainer(arguments: dict[str, Any], record: Record) -> Any:
    return transformers.Trainer(
        tiny_model(),
        transformers.TrainingArguments(**arguments),
        train_dataset=Rows(),
        eval_dataset=Rows(4),
        callbacks=[record],
    )


def sft_trainer(arguments: dict[str, Any], record: Record) -> Any:
    import datasets
    import trl

    datasets.disable_progress_bars()
    arguments.pop("average_tokens_across_devices")
    model = tiny_model()
    model.config._name_or_path = "tiny"
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments, bf16=False, max_length=64, packing=True),
        train_dataset=datasets.Dataset.from_list([{"input_ids": x.tolist()} for x in Rows().ids]),
        processing_class=tokenizer(),
        callbacks=[record],
    )


@functools.cache
def one_process(pool: WorkerPool, sft: bool = False) -> dict[str, Any]:
    return pool.run(train, 1, sft=sft)[0]


@pytest.mark.parametrize(("degree", "stage"), [(4, 1), (2, 2), (1, 3)])
def test_an_unedited_trainer_trains_as_one_process_does(pool, degree, stage):
    """Stock, norms are 4 times too large under ZeRO-1 and 2, and packed documents leak."""
    want = one_process(pool)
    for run in pool.run(train, 4, sp=4, degree=degree, stage=stage):
        assert run["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert run["norms"] == pytest.approx(want["norms"], rel=1e-5)
        assert run["tokens"] == want["tokens"]
        assert run["evaluation"] == pytest.approx(want["evaluation"], rel=1e-5)


def test_an_unedited_sft_trainer_trains_as_one_process_does(pool):
    want = one_process(pool, sft=True)
    for run in pool.run(train, 4, sp=4, degree=2, stage=2, sft=True):
        assert run["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert run["norms"] == pytest.approx(want["norms"], rel=1e-5)


def weights_on_two_meshes(ctx: RankContext) -> list[float]:
    """Of two micro batches: 3 and 1 loss tokens on the first mesh, 2 and 4 on the second. Over gloo
    the backward of transformers' loss needs rank 0 in every mesh."""
    from deepspeed.utils import groups

    halves = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    shards = [[[1, 2, 3, -100], [4, -100, -100, -100]], [[1, 2, -100, -100], [3, 4, 5, 6]]]
    own = [torch.tensor(x).chunk(2)[ctx.rank % 2] for x in shards[ctx.rank // 2]]
    batches = [{"shift_labels": x[None]} for x in own]
    trainer = Mock(args=Mock(average_tokens_across_devices=True))
    trainer.accelerator.parallelism_config = Mock(sp_size=2, sp_backend="deepspeed")
    with patch.object(groups, "_get_sequence_parallel_group", lambda: halves[ctx.rank // 2]):
        alst._with_weights(lambda *_: (batches, None))(trainer, None, 2, "cpu")
    return [float(weight) for weight in alst._WEIGHTS[trainer]]


def test_micro_batches_weigh_by_the_loss_tokens_of_all_meshes(pool):
    """Times the mean over its tokens, over 2 micro batches and 2 meshes: the mean over 10."""
    first, second = [3 * 4 / 10, 1 * 4 / 10], [2 * 4 / 10, 4 * 4 / 10]
    want = [first, first, second, second]
    assert pool.run(weights_on_two_meshes, 4) == [pytest.approx(x) for x in want]


def smoothed(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match="sp_size=2 leaves its label_smoother out of the loss"):
        train(ctx, sp=2, degree=1, stage=1, label_smoothing_factor=0.1)


def test_what_trainer_leaves_out_of_the_loss_is_refused(pool):
    pool.run(smoothed, 2)


def mesh_of_sizes(ctx: RankContext, **sizes: int) -> Any:
    from accelerate import ParallelismConfig

    degree = sizes.pop("ulysses_degree", None)
    mesh = sequence_mesh(ParallelismConfig(**sizes), degree)
    members = torch.distributed.get_process_group_ranks(mesh.sp_group)
    return mesh.ulysses_degree, mesh.ring_degree, members


def test_a_mesh_of_accelerates_sizes(pool):
    found = pool.run(mesh_of_sizes, 4, cp_size=2, dp_shard_size=2, ulysses_degree=1)
    assert found == [(1, 2, [0, 1])] * 2 + [(1, 2, [2, 3])] * 2
    assert pool.run(mesh_of_sizes, 4, sp_size=4)[3] == (4, 1, [0, 1, 2, 3])


def mesh_of_three(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match="must divide the 3 ranks"):
        mesh_of_sizes(ctx, sp_size=3)


def test_sizes_that_do_not_divide_the_world_are_refused(pool):
    pool.run(mesh_of_three, 4)
