"""A resumed run continues exactly, on other splits of the ranks too, or is refused everywhere."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import RankContext, RankError, fork_world
from trainer_runs import (
    ADAM,
    Numbers,
    degrees,
    errors_of_runs,
    patched,
    relative_difference,
    start,
    train,
)

from ds_usp import CheckpointError

FLAGS = ADAM + " --weight-decay 0.1"
SAVED = {"sp": 4, "u": 2, "zero": 1}
TOTAL_STEPS, SAVED_AT = 3, 1
HALF_BATCH = " --global-batch-size 2"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Numbers]:
    """A checkpoint of step 1, and the numbers of all 3 steps of the run that wrote it."""
    folder = tmp_path_factory.mktemp("straight")
    flags = f"{degrees(**SAVED)}{FLAGS} --save {folder / 'save'}"
    (numbers,) = train(4, flags, output_dir=folder, steps=TOTAL_STEPS, save_at=SAVED_AT)
    return folder / "save", numbers


@pytest.fixture(scope="module")
def resumed(
    uninterrupted: tuple[Path, Numbers], tmp_path_factory: pytest.TempPathFactory
) -> list[Numbers]:
    """Of runs that go on from that checkpoint: as it was, on other degrees of the same 4 ranks (the
    rest is data), and with another weight decay."""
    degrees_of_runs = ((4, 4), (4, 1), (2, 2), (2, 1), (1, 1))
    grids = [SAVED, *({"sp": sp, "u": u, "zero": SAVED["zero"]} for sp, u in degrees_of_runs)]
    runs = [f"{degrees(**grid)}{FLAGS} --load {uninterrupted[0]}" for grid in grids]
    folder = tmp_path_factory.mktemp("resumed")
    runs.append(f"{runs[0]} --weight-decay 100")
    return train(4, *runs, output_dir=folder, steps=TOTAL_STEPS - SAVED_AT)


def test_resuming_is_bit_exact_and_exact_on_other_sequence_degrees(uninterrupted, resumed):
    numbers, (same, *others, _) = uninterrupted[1], resumed
    assert same == numbers[SAVED_AT:]
    for other in others:
        assert relative_difference(other, numbers[SAVED_AT:]) < 1e-5


def test_the_flags_of_the_resuming_run_count(uninterrupted, resumed):
    """Weight decay 0.1 was saved; at 100 the weights and the loss fall apart."""
    (first, second), expected = resumed[-1], uninterrupted[1][SAVED_AT:]
    assert relative_difference([first], expected[:1]) < 1e-6
    assert relative_difference([second], expected[1:]) > 1e-3


KINDS = (
    {"sp": 4, "u": 2, "zero": 0},
    {"sp": 2, "u": 2, "zero": 2},
    {"sp": 4, "u": 2, "zero": 3},
    {"sp": 2, "tp": 2, "zero": 1},
    {"sp": 2, "pp": 2, "zero": 1},
    {"sp": 2, "pp": 2, "zero": 0},
)


@pytest.fixture(scope="module")
def runs_of_kinds(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[Numbers, Numbers]]]:
    """A folder with the checkpoint of each kind by its number, and the numbers of its run and of
    one that resumes it: two starts of ranks for all."""
    folder = tmp_path_factory.mktemp("kinds")
    flags = [f"{degrees(**grid)}{FLAGS}{HALF_BATCH}" for grid in KINDS]
    saving = [f"{run} --save {folder / str(kind)}" for kind, run in enumerate(flags)]
    loading = [f"{run} --load {folder / str(kind)}" for kind, run in enumerate(flags)]
    saved = train(4, *saving, output_dir=folder, steps=TOTAL_STEPS, save_at=SAVED_AT)
    resumed = train(4, *loading, output_dir=folder, steps=TOTAL_STEPS - SAVED_AT)
    return folder, list(zip(saved, resumed, strict=True))


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=map(str, KINDS))
def test_every_kind_of_checkpoint_resumes(kind, runs_of_kinds):
    numbers, resumed = runs_of_kinds[1][kind]
    assert resumed == numbers[SAVED_AT:]


def test_zero0_resumes_on_another_number_of_ranks(runs_of_kinds, tmp_path):
    folder, ((numbers, _), *_) = runs_of_kinds
    flags = f"{degrees(sp=2)}{FLAGS}{HALF_BATCH} --load {folder / '0'}"
    (resumed,) = train(2, flags, output_dir=tmp_path, steps=TOTAL_STEPS - SAVED_AT)
    assert relative_difference(resumed, numbers[SAVED_AT:]) < 1e-5


def test_what_cannot_be_resumed_is_refused_on_every_rank(uninterrupted, tmp_path):
    """Another model or parallel configuration, another padding of the vocabulary, a folder without
    a checkpoint, a file that was cut."""
    checkpoint, same = uninterrupted[0], degrees(**SAVED)
    short = tmp_path / "short"
    shutil.copytree(checkpoint, short)
    saved = short / f"step_{SAVED_AT}"
    name, size = next(iter(json.loads((saved / "usp_metadata.json").read_text())["files"].items()))
    (saved / name).write_bytes((saved / name).read_bytes()[:-1])
    cases = {
        f"{same} --num-layers 3 --load {checkpoint}": (
            "num_layers 2 in the checkpoint, 3 now",
            "another model",
        ),
        f"{degrees(**{**SAVED, 'zero': 3})} --load {checkpoint}": (
            "zero_stage 1 in the checkpoint, 3 now",
            "without pipeline",
        ),
        f"{degrees(sp=2, pp=2, zero=1)} --load {checkpoint}": (
            "pipeline_model_parallel_size 1 in the checkpoint, 2 now",
            "sequence_x_data_ranks 4 in the checkpoint, 2 now",
        ),
        f"{degrees(tp=4, zero=1)} --num-key-value-heads 4 --load {checkpoint}": (
            "padded_vocab_size 258 in the checkpoint, 260 now",
        ),
        f"{same} --load {tmp_path}": ("Leave --load out for the first run",),
        f"{same} --load {short}": (f"{size - 1} bytes, {size} were saved",),
    }
    errors = errors_of_runs(4, [run + FLAGS for run in cases], tmp_path)
    for texts, of_run in zip(cases.values(), errors, strict=True):
        for error in of_run:
            assert isinstance(error, CheckpointError), (texts, error)
            assert all(text in str(error) for text in texts), error


RESPLIT = {
    "bf16": (" --bf16", {"sp": 2, "tp": 2, "zero": 1}, [{"sp": 2, "tp": 2, "zero": 2}]),
    "gated": (
        " --num-key-value-heads 4",
        {"sp": 2, "tp": 2, "zero": 1},
        [{"sp": 4, "u": 2, "zero": 1}, {"tp": 4, "zero": 2}, {"sp": 2, "tp": 2, "zero": 0}],
    ),
    "plain": (
        " --no-untie-embeddings-and-output-weights --no-disable-bias-linear --no-swiglu",
        {"sp": 4, "u": 2, "zero": 0},
        [{"sp": 2, "tp": 2, "zero": 1}],
    ),
}


@pytest.fixture(scope="module")
def resplit(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Numbers, list[Numbers]]]:
    """Numbers of each run, and of those that go on from its checkpoint on other degrees."""
    folder, saving, loading = tmp_path_factory.mktemp("resplit"), [], []
    for name, (flags, saved, others) in RESPLIT.items():
        flags += f"{FLAGS} --make-vocab-size-divisible-by 4"
        saving.append(f"{degrees(**saved)} {flags} --save {folder / name}")
        loading += [f"{degrees(**grid)} {flags} --load {folder / name}" for grid in others]
    numbers = train(4, *saving, output_dir=folder, steps=TOTAL_STEPS, save_at=SAVED_AT)
    resumed = iter(train(4, *loading, output_dir=folder, steps=TOTAL_STEPS - SAVED_AT))
    counts = [len(others) for _, _, others in RESPLIT.values()]
    return {
        name: (of_run, [next(resumed) for _ in range(count)])
        for name, of_run, count in zip(RESPLIT, numbers, counts, strict=True)
    }


@pytest.mark.parametrize("name", RESPLIT)
def test_resuming_under_another_tensor_parallel_size_is_exact(name, resplit):
    numbers, others = resplit[name]
    for resumed in others:
        assert relative_difference(resumed, numbers[SAVED_AT:]) < 1e-5


def save_thrice(ctx: RankContext, *, flags: str, folder: Path) -> list[tuple[str, list[str]]]:
    """After each of three runs from the first step: the latest checkpoint, and all folders."""
    found = []
    for _ in range(3):
        run = start(f"{flags} --save {folder}", folder.parent)
        run.step()
        run.save()
        dist.barrier()
        folders = [path.name for path in folder.iterdir() if path.is_dir()]
        found.append(((folder / "latest").read_text().strip(), folders))
        dist.barrier()
    return found


def test_saving_a_step_again_replaces_it(tmp_path):
    save = tmp_path / "save"
    (save / "unfinished_step_5").mkdir(parents=True)
    flags = degrees(sp=2, zero=1) + FLAGS
    for found in fork_world(save_thrice, 2, flags=flags, folder=save):
        assert found == [(tag, [tag]) for tag in ("step_1", "step_1_again", "step_1")]
    assert (save / "step_1" / "usp_metadata.json").is_file()


def die_while_saving(ctx: RankContext, *, flags: str, folder: str) -> None:
    run = start(flags, folder)
    run.step()
    run.save()
    run.step()
    save = type(run.trainer.engine).save_checkpoint

    def dying(engine: Any, *args: Any, **kwargs: Any) -> None:
        save(engine, *args, **kwargs)
        if ctx.rank == 1:
            raise OSError("no space left on device")

    with patched({"deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint": dying}):
        run.save()


def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.GRACE_S", 1.0)  # the other rank waits for the dead one
    flags = degrees(sp=2, zero=1) + FLAGS + f" --save {tmp_path}"
    with pytest.raises(RankError, match="no space left"):
        fork_world(die_while_saving, 2, flags=flags, folder=str(tmp_path))
    assert (tmp_path / "latest").read_text().strip() == "step_1"
    assert not (tmp_path / "step_2").exists()
    (numbers,) = train(
        2, degrees(sp=2, zero=1) + FLAGS + f" --load {tmp_path}", output_dir=tmp_path, steps=1
    )
    assert numbers
