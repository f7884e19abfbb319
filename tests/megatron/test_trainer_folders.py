"""Output folders: files are complete after any end, and a refused run changes nothing."""

import json
import os
import re
import resource
import shutil
import signal
import socket
from argparse import Namespace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankContext, fork_world
from trainer_runs import ADAM, degrees, pretrain_on_rank, rows

from ds_usp import CheckpointError, ConfigError

SP2 = degrees(sp=2, zero=1) + ADAM


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def outcomes(*runs: str, folder: Path, world: int = 2) -> list[list[tuple[Exception | None, str]]]:
    """How each run to its end ended on each rank, and what it printed."""
    return fork_world(pretrain_on_rank, world, runs=list(runs), output_dir=str(folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the metrics and the checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("saved")
    outcomes(f"{SP2} --train-iters 2 --save-interval 1 --save {folder}/save", folder=folder)
    assert len(rows(folder)) == 2
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    path.write_bytes(data)


BEHIND = r"holds a checkpoint of step 2, this run begins at step 0. Continue it with --load"
OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def test_what_is_refused_changes_nothing(saved, tmp_path):
    save, step = saved / "save", saved / "save" / "step_2"
    more = f"{SP2} --train-iters 3"
    again = f"{more} --save {save}"
    other = tmp_path / "other"
    before = contents(saved)
    for results in outcomes(
        again,
        f"{again} --output-dir {other}",
        f"{again} --num-layers 3 --load {save}",
        f"{more} --output-dir {other} --save {other}/save --load {tmp_path}/nothing",
        f"{more} --output-dir {other} --data-path {tmp_path}/nothing.txt",
        folder=saved,
    ):
        messages = [BEHIND, BEHIND, "another model", "no finished checkpoint", "No such file"]
        for (error, _), text in zip(results, messages, strict=True):
            assert re.search(text, str(error)), error
    assert contents(saved) == before
    assert not other.exists()
    for name in ("mp_rank_00_model_states.pt", OPTIMIZER):
        intact = (step / name).read_bytes()
        flip(step / name)
        before = contents(saved)
        for ((error, _),) in outcomes(f"{again} --load {save}", folder=saved):
            assert isinstance(error, CheckpointError)
            assert f"{step / name}: the content is not what was saved" in str(error)
        assert contents(saved) == before
        (step / name).write_bytes(intact)


def test_a_second_trainer_is_refused_with_the_first_ones_process(saved, tmp_path):
    from usp_trainer.run_files import FolderLock

    lock = FolderLock(saved / "save")
    before = contents(saved)
    new = tmp_path / "new"
    anew = f"{SP2} --train-iters 3 --save {saved}/save"
    flags = f"{anew} --load {saved}/save"
    for results in outcomes(anew, flags, f"{flags} --output-dir {new}", folder=saved):
        for error, _ in results:
            assert isinstance(error, ConfigError)
            holder = f"process {os.getpid()} on {socket.gethostname()}, started "
            assert f"another trainer writes to {saved}/save: {holder}" in str(error)
    assert contents(saved) == before
    assert not new.exists()
    lock.release()
    assert not (saved / "save" / ".usp_lock").exists()


def test_a_lock_ends_with_its_process(tmp_path):
    from usp_trainer.run_files import FolderLock

    if not (child := os.fork()):
        FolderLock(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert f"process {child} on" in (tmp_path / ".usp_lock").read_text()
    FolderLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_metrics_file_is_repaired_and_what_is_done_is_said(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    first = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(first + '{"step": 3, "lo')
    metadata = folder / "save" / "step_2" / "usp_metadata.json"
    facts = json.loads(metadata.read_text())
    del facts["sha256"], facts["checksum"]
    metadata.write_text(json.dumps(facts | {"format": 1}))
    resume = f"{SP2} --load {folder}/save"
    first_run, *others = (f"{resume} --train-iters {steps}" for steps in (4, 4, 1))
    (error, printed), (no_error, done), (_, beyond) = outcomes(
        f"{first_run} --save {folder}/save", *others, folder=folder
    )[0]
    assert error is no_error is None
    said = "the checkpoint is of step 4, beyond --train-iters 1: nothing is left to train. More"
    assert said in beyond and "steps are done" not in beyond
    assert "metrics.jsonl: dropped line 3 of 3, which cannot be read" in printed
    assert f"resumed from step 2 of {folder}/save" in printed
    assert "was saved without checksums" in printed
    assert "all 4 steps are done: nothing is left to train" in done
    assert (folder / "metrics.jsonl").read_text().startswith(first)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]


def test_a_changed_metadata_file_is_refused_and_a_later_checkpoint_replaced_on_demand(
    saved, tmp_path
):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    metadata = folder / "save" / "step_2" / "usp_metadata.json"
    anew = f"{SP2} --train-iters 1 --save {folder}/save"
    intact = metadata.read_text()
    for change in (('"format": 2', '"format": 1'), ('"samples": 8', '"samples": 4')):
        metadata.write_text(intact.replace(*change))
        (error, _), (no_error, printed) = outcomes(
            f"{anew} --load {folder}/save",
            f"{anew} --overwrite-output" if "samples" in change[0] else anew,
            folder=folder,
        )[0]
        assert "usp_metadata.json was changed since it was saved" in str(error)
    assert no_error is None
    assert f"the earlier metrics.jsonl is kept as {folder}/metrics.jsonl.old" in printed
    assert (folder / "metrics.jsonl.old").read_bytes() == (saved / "metrics.jsonl").read_bytes()
    assert len(rows(folder)) == 1
    assert (folder / "save" / "latest").read_text() == "step_1\n"


class Runs:
    """Unpickled by any means that calls what a file names, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_poisoned_checkpoint_runs_nothing(saved, tmp_path):
    folder, ran = tmp_path / "copy", tmp_path / "ran"
    shutil.copytree(saved, folder)
    step = folder / "save" / "step_2"
    content = torch.load(step / OPTIMIZER, weights_only=False)
    torch.save(content | {"more": Runs(ran)}, step / OPTIMIZER)
    facts = json.loads((step / "usp_metadata.json").read_text())
    data = (step / OPTIMIZER).read_bytes()  # anyone who may write it may write its checksum
    facts["files"][OPTIMIZER], facts["sha256"][OPTIMIZER] = len(data), sha256(data).hexdigest()
    del facts["checksum"]
    checksum = sha256(json.dumps(dict(sorted(facts.items()))).encode()).hexdigest()
    (step / "usp_metadata.json").write_text(json.dumps(facts | {"checksum": checksum}))
    resume = f"--train-iters 3 --load {folder}/save"
    resharded = degrees(sp=2, zero=2) + ADAM
    for results in outcomes(f"{SP2} {resume}", f"{resharded} {resume}", folder=folder):
        for error, _ in results:
            assert isinstance(error, CheckpointError), error
            assert f"{step / OPTIMIZER} holds posix.mkdir, which is nothing that" in str(error)
    assert not ran.exists()


def test_links_in_the_folders_of_a_run_are_not_followed(saved, tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "out"
    (folder / "save").mkdir(parents=True)
    (victim / "folder").mkdir(parents=True)
    (victim / "file").write_text("precious")
    before = contents(victim)
    files = "loss.png loss.png.new metrics.jsonl metrics.jsonl.new latest.new"
    for name in files.replace("latest", "save/latest").split():
        (folder / name).symlink_to(victim / "file")
    for name in ("save/unfinished_step_1", "save/step_1", "save/step_1_again"):
        (folder / name).symlink_to(victim / "folder")
    flags = f"{SP2} --train-iters 1 --save {folder}/save --data-cache-path {saved}/data"
    link = folder / ".usp_lock"
    link.symlink_to(victim / "file")
    ((refused, _),) = outcomes(flags, folder=folder)[0]
    link.unlink()
    ((error, _),) = outcomes(flags, folder=folder)[0]
    assert isinstance(refused, ConfigError) and f"{link} is no file of this trainer" in str(refused)
    assert error is None and contents(victim) == before
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert (folder / "save" / "step_1" / "usp_metadata.json").is_file()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, "hard link"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(make, tmp_path):
    from usp_trainer.run_files import FolderLock, check_free

    (tmp_path / "victim").write_text("precious")
    lock = tmp_path / "out" / ".usp_lock"
    lock.parent.mkdir()
    os.link(tmp_path / "victim", lock) if make == "hard link" else make(lock)
    check_free(lock.parent)
    with pytest.raises(ConfigError, match=r"is no file of this trainer .* remove it"):
        FolderLock(lock.parent)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_traceback_is_not_written_through_a_link(tmp_path):
    from usp_trainer.launch import describe

    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "errors").symlink_to(victim)
    with pytest.raises(KeyError) as raised:
        {}["x"]
    text = describe(raised.value, Namespace(output_dir=str(tmp_path)), 0).text
    assert "KeyError: 'x'" in text and "Traceback (most recent call last)" in text
    assert list(victim.iterdir()) == []


def damage(path: Path, data: bytes | None) -> None:
    path.unlink() if data is None else path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("latest", None),
        ("latest", b"\xff\xfe"),
        ("latest", b"step_9"),
        ("latest", b""),
        ("step_2/usp_metadata.json", None),
        ("step_2/usp_metadata.json", b"\xff{"),
        ("step_2/usp_metadata.json", b"[]"),
        ("step_2/usp_metadata.json", b'{"format": 1}'),
        ("step_2/usp_metadata.json", b"[" * 200_000),
        ("step_2/usp_metadata.json", b'{"progress": {"step": 2}, "x":' + b"[" * 990 + b"]" * 990),
        ("step_2/usp_metadata.json", b'{"progress": {"step": true}}'),
        ("step_2/usp_metadata.json", b'{"progress": {"step": -1}}'),
        ("step_2/usp_metadata.json", b'{"progress": {"step": 2}, "files": {"../../x": 1}}'),
        ("step_2/usp_metadata.json", b'{"progress": {"step": 2}, "files": {"/etc/x": 1}}'),
        ("latest", b"../save/step_2"),
        ("latest", b"step_2/../step_1"),
        ("latest", b"/etc"),
        ("latest", b".."),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_none(name, data, tmp_path):
    from usp_trainer.arguments import parse
    from usp_trainer.run_files import RunFolders, check_files

    save, output = tmp_path / "save", tmp_path / "output"
    for step in (1, 2):
        (save / f"step_{step}").mkdir(parents=True)
        facts = json.dumps({"progress": {"step": step}})
        (save / f"step_{step}" / "usp_metadata.json").write_text(facts)
    (save / "latest").write_text("step_2\n")
    damage(save / name, data)
    before = contents(tmp_path)
    start = "--save", str(save), "--output-dir", str(output)
    with pytest.raises(CheckpointError, match=r"latest( \(.*available: step_1.*\))?; give another"):
        RunFolders(parse(start))
    with pytest.raises(CheckpointError, match=f"cannot be read: {save}/.*Copy it again"):
        check_files(parse([*start, "--load", str(save)]))
    assert contents(tmp_path) == before and not output.exists()
    RunFolders(parse([*start, "--overwrite-output"])).close(refused=True)


def test_a_full_disk_ends_the_run_with_whole_lines(tmp_path):
    from usp_trainer.progress import MetricsFile

    file = MetricsFile(tmp_path, None)
    file.write({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len('{"step": 1}\n') + 5, before[1]))
    try:
        with pytest.raises(OSError, match=r"metrics.jsonl: .* at step 2 .*MiB free there"):
            file.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def save_on_a_full_disk(ctx: RankContext, *, flags: str, folder: str) -> Any:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        return pretrain_on_rank(ctx, runs=[flags], output_dir=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_the_disk_has_no_room_for_is_said_once(saved, tmp_path):
    data = f"--data-cache-path {saved}/data"
    flags = f"{SP2} --train-iters 1 --save {tmp_path}/save {data}"
    results = fork_world(save_on_a_full_disk, 2, flags=flags, folder=str(tmp_path / "output"))
    first, second = (str(error) for ((error, _),) in results)
    assert first == second
    for part in ("step 1 could not be written to", "GiB are free", "There is no checkpoint yet"):
        assert part in first
