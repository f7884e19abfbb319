"""A resumed run continues exactly, on other splits of the ranks too, or is refused everywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import RankContext, RankError, fork_world
from trainer_runs import (
    ADAM,
    Numbers,
    degrees,
    errors,
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
    return folder / "save", save_and_continue(folder, SAVED)


def save_and_continue(
    folder: Path, grid: dict[str, int], world: int = 4, more: str = ""
) -> Numbers:
    flags = degrees(**grid) + FLAGS + more + f" --save {folder / 'save'}"
    (numbers,) = train(world, flags, output_dir=folder, steps=TOTAL_STEPS, save_at=SAVED_AT)
    return numbers


def resume(folder: Path, checkpoint: Path, *grids: dict[str, int], more: str = "") -> list[Numbers]:
    runs = [degrees(**grid) + FLAGS + more + f" --load {checkpoint}" for grid in grids]
    return train(4, *runs, output_dir=folder, steps=TOTAL_STEPS - SAVED_AT)


def test_resuming_is_bit_exact_and_exact_on_other_sequence_degrees(uninterrupted, tmp_path):
    checkpoint, numbers = uninterrupted
    # Of the same 4 ranks; the rest is data.
    degrees_of_runs = ((4, 4), (4, 1), (2, 2), (2, 1), (1, 1))
    others = [{"sp": sp, "u": u, "zero": SAVED["zero"]} for sp, u in degrees_of_runs]
    same, *resumed = resume(tmp_path, checkpoint, SAVED, *others)
    assert same == numbers[SAVED_AT:]
    for other in resumed:
        assert relative_difference(other, numbers[SAVED_AT:]) < 1e-5


KINDS = (
    {"sp": 4, "u": 2, "zero": 0},
    {"sp": 2, "u": 2, "zero": 2},
    {"sp": 4, "u": 2, "zero": 3},
    {"sp": 2, "tp": 2, "zero": 1},
    {"sp": 2, "pp": 2, "zero": 1},
    {"sp": 2, "pp": 2, "zero": 0},
)


@pytest.fixture(scope="module")
def runs_of_kinds(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Numbers, Numbers]]:
    """Numbers of the run of each kind, and of one that resumes it: two starts of ranks for all."""
    folder = tmp_path_factory.mktemp("kinds")
    flags = [f"{degrees(**grid)}{FLAGS}{HALF_BATCH}" for grid in KINDS]
    saving = [f"{run} --save {folder / str(kind)}" for kind, run in enumerate(flags)]
    loading = [f"{run} --load {folder / str(kind)}" for kind, run in enumerate(flags)]
    saved = train(4, *saving, output_dir=folder, steps=TOTAL_STEPS, save_at=SAVED_AT)
    resumed = train(4, *loading, output_dir=folder, steps=TOTAL_STEPS - SAVED_AT)
    return list(zip(saved, resumed, strict=True))


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=map(str, KINDS))
def test_every_kind_of_checkpoint_resumes(kind, runs_of_kinds):
    numbers, resumed = runs_of_kinds[kind]
    assert resumed == numbers[SAVED_AT:]


def test_zero0_resumes_on_another_number_of_ranks(tmp_path):
    numbers = save_and_continue(tmp_path, {"sp": 2}, world=2)
    (resumed,) = resume(tmp_path, tmp_path / "save", {"sp": 4, "u": 2})
    assert relative_difference(resumed, numbers[SAVED_AT:]) < 1e-5


def test_another_model_or_parallel_config_is_refused_on_every_rank(uninterrupted, tmp_path):
    changed = {
        "num_layers 2 in the checkpoint, 3 now": degrees(**SAVED) + " --num-layers 3",
        "zero_stage 1 in the checkpoint, 3 now": degrees(**{**SAVED, "zero": 3}),
        "pipeline_model_parallel_size 1 in the checkpoint, 2 now": degrees(sp=2, pp=2, zero=1),
    }
    also = ("another model", "without pipeline", "sequence_x_data_ranks 4 in the checkpoint, 2 now")
    runs = [f"{flags} {FLAGS} --load {uninterrupted[0]}" for flags in changed.values()]
    found = errors_of_runs(4, runs, tmp_path)
    for *texts, of_run in zip(changed, also, found, strict=True):
        for error in of_run:
            assert isinstance(error, CheckpointError), texts
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


def test_a_vocabulary_padded_for_one_tensor_parallel_size_is_refused(uninterrupted, tmp_path):
    flags = degrees(tp=4, zero=1) + f" --num-key-value-heads 4 --load {uninterrupted[0]}"
    for error in errors(4, flags + FLAGS, tmp_path):
        assert "padded_vocab_size 258 in the checkpoint, 260 now" in str(error)


def test_a_folder_without_checkpoint_or_with_a_short_file_is_refused(uninterrupted, tmp_path):
    flags = degrees(sp=2, zero=1) + FLAGS
    for error in errors(2, f"{flags} --load {tmp_path}", tmp_path):
        assert isinstance(error, CheckpointError)
        assert "Leave --load out for the first run" in str(error)
    save_and_continue(tmp_path, {"sp": 2, "zero": 1}, world=2)
    saved = tmp_path / "save" / f"step_{SAVED_AT}"
    name, size = next(iter(json.loads((saved / "usp_metadata.json").read_text())["files"].items()))
    (saved / name).write_bytes((saved / name).read_bytes()[:-1])
    for error in errors(2, f"{flags} --load {tmp_path / 'save'}", tmp_path):
        assert isinstance(error, CheckpointError)
        assert f"{size - 1} bytes, {size} were saved" in str(error)


def test_the_flags_of_the_resuming_run_count(uninterrupted, tmp_path):
    """Weight decay 0.1 was saved; at 100 the weights and the loss fall apart."""
    flags = degrees(**SAVED) + ADAM + f" --weight-decay 100 --load {uninterrupted[0]}"
    (numbers,) = train(4, flags, output_dir=tmp_path, steps=2)
    assert relative_difference(numbers[:1], uninterrupted[1][SAVED_AT : SAVED_AT + 1]) < 1e-6
    assert relative_difference(numbers[1:], uninterrupted[1][SAVED_AT + 1 :]) > 1e-3


def test_saving_a_step_again_replaces_it(tmp_path):
    (tmp_path / "save" / "unfinished_step_5").mkdir(parents=True)
    for tag, gone in (
        ("step_1", "step_1_again"),
        ("step_1_again", "step_1"),
        ("step_1", "step_1_again"),
    ):
        save_and_continue(tmp_path, {"sp": 2, "zero": 1}, world=2)
        assert (tmp_path / "save" / "latest").read_text().strip() == tag
        assert (tmp_path / "save" / tag / "usp_metadata.json").is_file()
        assert not (tmp_path / "save" / gone).exists()
    assert not list((tmp_path / "save").glob("unfinished_*"))


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
