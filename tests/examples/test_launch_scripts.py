"""The training scripts: golden commands, settings, refusals, logs. They train in tests/megatron.

``python tests/examples/test_launch_scripts.py`` writes the golden files anew.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from programs import (
    CHECKOUT,
    FOLDER,
    GPUS,
    MEGATRON_LM_SCRIPTS,
    PATHS,
    PROGRAMS,
    ROOT,
    SCRIPTS,
    bash,
    environment,
    free_port,
    python,
    start,
)

from ds_usp.planner import ParallelConfig, Workload, load_model
from ds_usp.planner.emit import emit

SRUN_RANK = f"{FOLDER}/srun_rank.sh"
TRAINER = f"{FOLDER}/pretrain_gpt_usp.py"
MEGATRON = f"megatron_patches.run {CHECKOUT}/pretrain_gpt.py"
MEGATRON_DEEPSPEED = os.environ.get("MEGATRON_DEEPSPEED_PATH", "")
MEGATRON_LM = os.environ.get("MEGATRON_LM_PATH", "")
DRY_RUN = {"DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": ""}
# The checkout is a stand-in that has a pretrain_gpt.py; the implementation is what a GPU machine
# with TransformerEngine takes.
LM = {**DRY_RUN, "MEGATRON_LM_PATH": str(CHECKOUT), "TRANSFORMER_IMPL": "transformer_engine"}
LM_SETTINGS = {
    "lm-1.3B": {**LM, "NUM_GPUS": "4"},
    "lm-llama3": {**LM, "NUM_GPUS": "8"},
    "lm-tiny": {**LM, "NUM_GPUS": "4", "TRANSFORMER_IMPL": ""},
}
# Each script and the program that it starts -> its settings. 30B differs from 1.3B in numbers.
CASES = {
    **{
        (size, program): {**DRY_RUN, "NUM_GPUS": GPUS[size], **settings}
        for size in SCRIPTS
        for program, settings in PROGRAMS.items()
        if size != "30B"
    },
    **{(size, "megatron_lm"): settings for size, settings in LM_SETTINGS.items()},
}
MEGATRON_ONLY = set(
    """
    --checkpoint-activations --data-impl --deepspeed --deepspeed-activation-checkpointing
    --deepspeed_config --distributed-backend --merge-file
    --no-async-tensor-model-parallel-allreduce --no-bias-dropout-fusion --no-bias-gelu-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-pipeline-parallel
    --num-workers --override-opt_param-scheduler --rotary-position-embeddings-theta
    --tokenizer-type --vocab-file
    """.split()  # noqa: SIM905
)


@pytest.fixture(autouse=True)
def no_gpu_here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same counts on machines with GPUs."""
    command = tmp_path_factory.mktemp("bin") / "nvidia-smi"
    monkeypatch.setenv("PATH", executable(command, "exit 1"))


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str]):
    """Prints a script's command: the words up to the program, its flags, and the whole text."""

    def run(size: str, program: str = "trainer", *arguments: str, **settings: str):
        settings = {**DRY_RUN, **PROGRAMS[program], **settings}
        code = start(size, *arguments, **settings)
        text, errors = capsys.readouterr()
        assert code == 0, errors
        words = shlex.split(text.partition("\n\n")[0].replace("\\\n", " "))
        first = 1 + max(index for index, word in enumerate(words) if word.endswith(".py"))
        return " ".join(words[:first]), words[first:], text

    return run


def values(flags: list[str]) -> dict[str, str]:
    return dict(pairwise(flags))


def golden(size: str, program: str) -> Path:
    return Path(__file__).resolve().parent / "golden" / f"{size}.{program}.txt"


def printed(size: str, program: str, *arguments: str, **settings: str) -> str:
    done = bash(size, *arguments, **{**CASES[size, program], **settings})
    assert done.returncode == 0, done.stderr
    framework = "Megatron-LM" if program == "megatron_lm" else "Megatron-DeepSpeed"
    text = done.stdout.replace(str(CHECKOUT), f"/checkouts/{framework}")
    return text.replace(str(ROOT), "$ROOT")


def lm_printed(*arguments: str, **settings: str) -> str:
    return printed("lm-1.3B", "megatron_lm", *arguments, **settings)


@pytest.mark.parametrize(("size", "program"), CASES)
def test_a_dry_run_prints_the_golden_command(size, program):
    assert printed(size, program) == golden(size, program).read_text()


@pytest.mark.parametrize("size", PATHS)
def test_scripts_are_settings_only(size):
    *lines, last = PATHS[size].read_text().replace("\\\n", "").splitlines()
    folder = "../sequence_parallel/" if size in MEGATRON_LM_SCRIPTS else ""
    assert last == f'. "$(dirname "${{BASH_SOURCE[0]}}")/{folder}launch.sh"'
    for line in lines:
        is_flags = folder and line.startswith("set -- ") and line.endswith(' "$@"')
        is_setting = re.fullmatch(r"[a-z_]+=\S*", line)
        assert not line or line.startswith("#") or is_flags or is_setting, line


def test_a_run_of_other_degrees_is_named_and_links_give_way(tmp_path, capsys):
    import launch_job
    from launch_settings import read_settings

    def job(ulysses: str, *arguments: str) -> launch_job.Job:
        script = {"seq_length": "64", "model_size": "tiny", "num_layers": "2", "hidden_size": "32"}
        script |= {"num_attn_heads": "4", "global_batch_size": "4", "lr": "1e-3", "device": "cpu"}
        script |= {"train_iters": "2", "output_home": str(tmp_path), "sp_size": "4"}
        script |= {"precision": "fp32", "ulysses_degree": ulysses}
        return launch_job.Trainer(read_settings(script, {}), arguments, {})

    first = job("2")
    first.create_files()
    assert capsys.readouterr().out == ""
    Path(first.checkpoint, "latest").write_text("step_2\n")
    job("2").create_files()  # its own is continued
    job("4", "--load", "elsewhere").create_files()
    assert capsys.readouterr().out == ""
    (tmp_path / "victim").write_text("precious")
    log = Path(job("4").log)
    log.unlink()
    log.symlink_to(tmp_path / "victim")
    job("4").create_files()
    assert f"continue it with --load {first.checkpoint}\n" in capsys.readouterr().out
    assert (tmp_path / "victim").read_text() == "precious" and log.read_text()


@pytest.mark.parametrize("size", SCRIPTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_trainer_knows_every_flag(size, program, dry_run):
    """Of Megatron-DeepSpeed's, those that both have; the rest are listed above."""
    from usp_trainer.arguments import build_parser
    from usp_trainer.validate_args import validate_and_derive

    _, flags, text = dry_run(size, program, NUM_GPUS=GPUS[size])
    args, unknown = build_parser().parse_known_args(flags)
    ranks = int(GPUS[size])
    validated = validate_and_derive(args, ranks)
    assert validated.data_parallel_size == ranks // args.ds_sequence_parallel_size
    assert {word for word in unknown if word.startswith("--")} <= MEGATRON_ONLY
    if program == "trainer":
        assert unknown == []
    else:  # DeepSpeed's configuration has the same values
        config = json.loads(text.partition("{")[1] + text.partition("{")[2])
        assert config["train_batch_size"] == args.global_batch_size
        assert config["train_micro_batch_size_per_gpu"] == args.micro_batch_size
        assert config["zero_optimization"]["stage"] == args.zero_stage
        assert config["gradient_clipping"] == args.clip_grad
        assert config["bf16"]["enabled"] is args.bf16


def parsed(program: str, checkout: str, runs: list[list[str]]) -> list[str]:
    """What the parser of a checkout, with the flags that the patches add, reads of each run."""
    done = python("-W", "ignore", "-c", program, checkout, json.dumps(runs), DS_ACCELERATOR="cpu")
    lines = [line for line in done.stdout.splitlines() if line.startswith("parsed ")]
    assert lines, done.stderr
    return [line.removeprefix("parsed ") for line in lines]


@pytest.mark.megatron_deepspeed
@pytest.mark.skipif(not MEGATRON_DEEPSPEED, reason="MEGATRON_DEEPSPEED_PATH is not set")
def test_megatron_deepspeed_knows_every_flag(dry_run):
    program = (
        "import json, sys; from pathlib import Path; import megatron_patches as m\n"
        "host = 'megatron_deepspeed'; m.prepare(host, Path(sys.argv[1])); m.apply(host)\n"
        "from megatron.arguments import parse_args\n"
        "for sys.argv[1:] in json.loads(sys.argv[2]):\n"
        "    args = parse_args()\n"
        "    print('parsed', args.num_layers, args.ulysses_degree, args.usp_layout)\n"
    )
    runs = [dry_run(size, "megatron_deepspeed")[1] for size in SCRIPTS]
    degrees = ("24 2", "64 4", "32 4", "2 2")
    assert parsed(program, MEGATRON_DEEPSPEED, runs) == [f"{pair} zigzag" for pair in degrees]


def flags(text: str) -> list[str]:
    words = shlex.split(text.replace("\\\n", " "))
    return words[1 + next(i for i, word in enumerate(words) if word.endswith(".py")) :]


@pytest.mark.megatron_lm
@pytest.mark.skipif(not MEGATRON_LM, reason="MEGATRON_LM_PATH is not set")
def test_megatron_lm_knows_every_flag():
    """Also those of ``ds-usp plan --emit megatron-lm``, with every kind of flag."""
    program = (
        "import json, sys; from pathlib import Path; import megatron_patches as m\n"
        "m.prepare('megatron_lm', Path(sys.argv[1])); m.apply('megatron_lm')\n"
        "from megatron.training.arguments import parse_args\n"
        "for sys.argv[1:] in json.loads(sys.argv[2]):\n"
        "    args = parse_args()\n"
        "    print('parsed', args.num_layers, args.context_parallel_size, args.ulysses_degree)\n"
    )
    variants = (
        {"TRANSFORMER_IMPL": "local", "ACTIVATION_CHECKPOINT": "true", "ZERO_STAGE": "0"},
        {"TENSORBOARD_DIR": "tb", "WANDB_PROJECT": "p", "EXIT_INTERVAL": "7", "MP_SIZE": "2"},
    )
    runs = [flags(printed(size, "megatron_lm")) for size in MEGATRON_LM_SCRIPTS]
    runs += [flags(lm_printed(**{**variant, "NUM_GPUS": "8"})) for variant in variants]
    work = Workload(load_model("llama3-8b"), 131072)
    degrees = {"tp": 2, "ulysses": 4, "ring": 2, "pp": 2, "layers_per_virtual_stage": 8}
    config = ParallelConfig(**degrees, zero=1, recompute="attention")
    runs.append(emit("megatron-lm", work, config).replace("\\\n", " ").split())
    sizes = ["24 4 2", "32 4 2", "2 4 2", "24 4 2", "24 4 2", "32 8 4"]
    assert parsed(program, MEGATRON_LM, runs) == sizes


NODES = {"NNODES": "2", "NUM_GPUS": "8", "MASTER_ADDR": "node-0"}


def test_torchrun_on_one_and_two_nodes(dry_run):
    start, *_ = dry_run("1.3B", LAUNCHER="torchrun", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert start == (
        "torchrun --nnodes 1 --node-rank 0 --nproc-per-node 4 --master-addr 127.0.0.1 "
        f"--master-port 29500 {TRAINER}"
    )
    settings = {**NODES, "LAUNCHER": "torchrun", "NODE_RANK": "1", "MASTER_PORT": "29501"}
    launcher = (
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr node-0 "
        "--master-port 29501"
    )
    start, flags, _ = dry_run("30B", **settings)
    assert start == f"{launcher} {TRAINER}"
    assert flags == dry_run("30B", NUM_GPUS="16")[1]
    start, *_ = dry_run("30B", "megatron_deepspeed", **settings)
    assert start == f"{launcher} --module {MEGATRON}"


def executable(path: Path, *lines: str) -> str:
    """Write a shell script; PATH with its folder first."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return os.pathsep.join([str(path.parent), os.environ["PATH"]])


def test_srun_takes_the_nodes_of_the_job(tmp_path, dry_run):
    nodes = '[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"'
    path = executable(tmp_path / "scontrol", nodes)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_NNODES": "2"}
    settings = {"LAUNCHER": "srun", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "PATH": path}
    start, flags, _ = dry_run("30B", **settings, **job)
    assert start == (
        "env MASTER_ADDR=n3 MASTER_PORT=29500 LOCAL_WORLD_SIZE=4 LOCAL_SIZE=4 srun --nodes 2 "
        f"--ntasks-per-node 4 --kill-on-bad-exit=1 bash {SRUN_RANK} python {TRAINER}"
    )
    assert flags == dry_run("30B", NUM_GPUS="8")[1]
    start, *_ = dry_run("30B", "megatron_deepspeed", LAUNCHER="srun", **NODES)
    assert start.endswith(f"python -m {MEGATRON}")


def test_gpus_are_counted(tmp_path, dry_run):
    """Of this node, of CUDA_VISIBLE_DEVICES, or of a host file."""
    path = executable(tmp_path / "nvidia-smi", "seq 8")
    assert "--num_gpus 8" in dry_run("1.3B", PATH=path)[0]
    start, _, text = dry_run("1.3B", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert "--num_gpus" not in start and "_g4_" in text
    nodes = tmp_path / "nodes"
    nodes.write_text("worker-0 slots=8\nworker-1 slots=8\n")
    start, _, text = dry_run("30B", HOSTFILE=str(nodes))
    assert f"--hostfile {nodes}" in start and "--num_gpus" not in start and "_g16_" in text


def test_every_setting_can_be_overridden(dry_run, monkeypatch):
    settings = {"SEQ_LENGTH": "65536", "ULYSSES_DEGREE": "1", "MP_SIZE": "2", "NUM_GPUS": "16"}
    start, flags, _ = dry_run("1.3B", "trainer", "--eod-mask-loss", LR="0.5", **settings)
    assert "--num_gpus 16" in start and flags[-1] == "--eod-mask-loss"
    assert values(flags).items() >= {
        ("--seq-length", "65536"),
        ("--max-position-embeddings", "65536"),
        ("--ulysses-degree", "1"),
        ("--tensor-model-parallel-size", "2"),
        ("--lr", "0.5"),
    }
    logs = {"TENSORBOARD_DIR": "tb", "WANDB_PROJECT": "p", "EXIT_INTERVAL": "7"}
    monkeypatch.setattr("usp_trainer.run_files.importlib.util.find_spec", lambda name: name)
    for program in PROGRAMS:
        flags = dry_run("1.3B", program, **logs)[1]
        expected = {("--tensorboard-dir", "tb"), ("--wandb-project", "p"), ("--exit-interval", "7")}
        assert values(flags).items() >= expected
    assert "--log-timers-to-tensorboard" in flags


def test_derived_settings(dry_run):
    """Steps shorten warm-up and decay; without a Ulysses degree it is the largest that fits."""
    flags = values(dry_run("1.3B", TRAIN_ITERS="1000")[1])
    assert [flags[f"--{name}-iters"] for name in ("train", "lr-decay", "lr-warmup")] == [
        "1000",
        "1000",
        "10",
    ]
    settings = {"ULYSSES_DEGREE": "", "SP_SIZE": "32", "MP_SIZE": "2", "BATCH_SIZE": "2"}
    assert values(dry_run("1.3B", **settings)[1])["--ulysses-degree"] == "8"
    assert "_uauto_" in dry_run("1.3B", ULYSSES_DEGREE="auto")[2]


def test_data_with_weights_and_spaces(tmp_path, dry_run):
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_text("tokens")
        (tmp_path / name).with_suffix(".idx").touch()
    a, b, text = str(tmp_path / "a"), str(tmp_path / "b"), tmp_path / "with space.txt"
    flags = dry_run("1.3B", DATA_PATH=f"0.3 {a} 0.7 {b}")[1]
    first = flags.index("--data-path") + 1
    assert flags[first : first + 6] == ["0.3", a, "0.7", b, "--vocab-size", "50257"]
    text.write_text("text")
    flags = dry_run("1.3B", DATA_PATH=str(text))[1]
    first = flags.index("--data-path") + 1
    assert flags[first : first + 2] == [str(text), "--rotary-base"]


def test_settings_of_the_neighbours_hold_here():
    """Local layers need no kernel of apex; recomputation, two nodes, data with weights."""
    words = lm_printed(TRANSFORMER_IMPL="local", ACTIVATION_CHECKPOINT="true", NUM_GPUS="8")
    for flag in ("--no-persist-layer-norm", "--no-rope-fusion", "--recompute-method"):
        assert flag in words and flag not in lm_printed()
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0", "GLOBAL_BATCH_SIZE": "4"}
    assert lm_printed(**{**nodes, "NUM_GPUS": "8"}).startswith(
        "torchrun \\\n    --nnodes 2 \\\n    --node-rank 1"
    )
    assert "python -m megatron_patches.run" in lm_printed(**nodes, LAUNCHER="srun")
    assert lm_printed("--log-throughput").endswith("--log-throughput\n")
    assert "--sequence-parallel" in lm_printed(MP_SIZE="2", NUM_GPUS="8")
    assert "--use-distributed-optimizer" not in lm_printed(ZERO_STAGE="0")


NO_GPUS = {"DRY_RUN": "0"}
CPU = {"DEVICE": "cpu", "PRECISION": "fp32"}
MDS = {"NUM_GPUS": "4", "MEGATRON_DEEPSPEED_PATH": str(CHECKOUT)}
REFUSED = [
    ({"NUM_GPUS": "6"}, "6 ranks cannot hold MP_SIZE=1 x SP_SIZE=4 x PP_SIZE=1 = 4 ranks"),
    ({"ULYSSES_DEGREE": "3"}, "ULYSSES_DEGREE=3 does not divide SP_SIZE=4. Use one of 4 (ring 1)"),
    ({"ULYSSES_DEGREE": "0"}, "ULYSSES_DEGREE='0' must be auto, or a whole number of 1 or more"),
    (
        {"ULYSSES_DEGREE": "4", "MP_SIZE": "8"},
        "at least 4 query heads on each tensor-parallel rank, there are 2 (16 heads, MP_SIZE=8)",
    ),
    ({"MP_SIZE": "3"}, "MP_SIZE=3 must divide the 16 query heads"),
    ({"NUM_GPUS": "16"}, "Use GLOBAL_BATCH_SIZE=4"),
    ({"ZERO_STAGE": "3", "PP_SIZE": "2"}, "Use ZERO_STAGE=1 or PP_SIZE=1"),
    ({"ZERO_STAGE": "4"}, "ZERO_STAGE='4' must be 0, 1, 2 or 3"),
    ({"SEQ_LENGTH": "32k"}, "SEQ_LENGTH='32k' must be a whole number of 1 or more"),
    ({"NUM_LAYERS": ""}, "NUM_LAYERS='' must be a whole number of 1 or more"),
    ({"TRAIN_TOKENS_IN_BILLION": "0.5"}, "TRAIN_TOKENS_IN_BILLION='0.5' must be a whole number"),
    ({"TRAIN_TOKENS_IN_BILLION": ""}, "TRAIN_TOKENS_IN_BILLION is not set; set it or TRAIN_ITERS"),
    ({"ACTIVATION_CHECKPOINT": "1"}, "ACTIVATION_CHECKPOINT='1' must be true or false"),
    ({"ROTARY": "yes"}, "ROTARY='yes' must be true or false"),
    ({"DRY_RUN": "yes"}, "DRY_RUN='yes' must be 0 or 1"),
    ({"DEVICE": "gpu"}, "DEVICE='gpu' must be auto, cpu or cuda"),
    ({"CLIP_GRAD": "-1"}, "CLIP_GRAD='-1' must be a finite number of 0 or more"),
    ({"LR": "nan"}, "LR='nan' must be a finite number of 0 or more"),
    ({"SAVE_INTERVAL": "0"}, "SAVE_INTERVAL='0' must be a whole number of 1 or more"),
    ({"PRECISION": "fp16"}, "PRECISION='fp16' must be bf16 or fp32"),
    ({"HOSTFILE": "/none"}, "HOSTFILE=/none does not exist"),
    ({"HOSTFILE": "/none", "NUM_GPUS": "4"}, "leave NUM_GPUS out"),
    (
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "NUM_GPUS": "8"},
        "CUDA_VISIBLE_DEVICES names the GPUs: leave NUM_GPUS out",
    ),
    ({**NO_GPUS, "DATA_PATH": __file__}, "no GPU here. Set NUM_GPUS"),
    ({**NO_GPUS, "NUM_GPUS": "4"}, "set DATA_PATH to a UTF-8 text file"),
    (
        {"DATA_PATH": "/none"},
        "DATA_PATH=/none: No such file or directory, and no /none.idx. Make it: python tools/prepr",
    ),
    ({"DATA_PATH": "0.5 @data@ 0.5 /none"}, "DATA_PATH=/none: No such file"),
    ({"DATA_PATH": "0.5 @data@ 0.5"}, "2 weights for 1 paths. Give each path a weight before it"),
    ({"LAUNCHER": "mpirun"}, "LAUNCHER='mpirun' must be deepspeed, torchrun or srun"),
    ({"NNODES": "2"}, "DeepSpeed's launcher needs HOSTFILE"),
    ({"NNODES": "0", "LAUNCHER": "torchrun"}, "NNODES='0' must be a whole number of 1 or more"),
    ({"LAUNCHER": "torchrun", "HOSTFILE": "h"}, "HOSTFILE is for LAUNCHER=deepspeed, not torchrun"),
    (
        {"LAUNCHER": "torchrun", "NNODES": "2"},
        "NNODES=2 needs MASTER_ADDR, a name of the first node, and NODE_RANK, from 0 to 1",
    ),
    (
        {"LAUNCHER": "torchrun", "NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
        "NODE_RANK=2 must be from 0 to 1",
    ),
    ({**NO_GPUS, "LAUNCHER": "srun", "NUM_GPUS": "4"}, "needs a SLURM job"),
    (
        {"TRAIN_ITERS": "5", "LR_WARMUP_ITERS": "5", **MDS},
        "LR_WARMUP_ITERS=5 must be below LR_DECAY_ITERS=5 (Megatron-DeepSpeed). Use LR_WARMUP_IT",
    ),
    ({"DATA_PATH": __file__, **MDS}, "Megatron-DeepSpeed reads encoded data, not"),
    ({"DRY_RUN": "0", **MDS}, "Megatron-DeepSpeed reads encoded data: set DATA_PATH"),
    ({"DRY_RUN": "0", "DATA_PATH": "@data@", **MDS}, "set VOCAB_PATH and MERGE_PATH"),
    ({**MDS, "MEGATRON_DEEPSPEED_PATH": "/none"}, "=/none has no pretrain_gpt.py"),
    (
        {"SEQ_LEN": "65536"},
        "SEQ_LEN is no setting; did you mean SEQ_LENGTH? The settings are in launch_settings.py",
    ),
]
LM_REFUSED = [
    ({"MEGATRON_LM_PATH": ""}, "set MEGATRON_LM_PATH to a checkout of Megatron-LM: git clone"),
    ({"MEGATRON_LM_PATH": "/none"}, "MEGATRON_LM_PATH=/none has no pretrain_gpt.py"),
    ({"ZERO_STAGE": "3"}, "ZERO_STAGE=3: Megatron-LM has its distributed optimizer"),
    ({"SEQ_LENGTH": "1001"}, "is not a multiple of 2 x SP_SIZE = 8, which Megatron-LM requires"),
    ({"USP_LAYOUT": "contiguous"}, "USP_LAYOUT=contiguous: Megatron-LM shards batches in an order"),
    ({"LAUNCHER": "deepspeed"}, "LAUNCHER=deepspeed does not start Megatron-LM. Use LAUNCHER="),
    ({"TRANSFORMER_IMPL": "te"}, "TRANSFORMER_IMPL='te' must be transformer_engine or local"),
    ({"USP_FRAMEWORK": "mds"}, "USP_FRAMEWORK='mds' must be megatron_lm"),
    ({"DATA_PATH": "mock", "VOCAB_SIZE": ""}, "mock data need VOCAB_SIZE"),
    ({"DATA_PATH": __file__}, "Megatron-LM reads encoded data, not"),
    ({"DRY_RUN": "0"}, "Megatron-LM reads encoded data: set DATA_PATH, or DATA_PATH=mock"),
    (
        {"DRY_RUN": "0", "DATA_PATH": "@data@", "TOKENIZER_TYPE": "HuggingFaceTokenizer"},
        "TOKENIZER_TYPE=HuggingFaceTokenizer needs TOKENIZER_MODEL",
    ),
    ({"DRY_RUN": "0", "DATA_PATH": "@data@"}, "set VOCAB_PATH and MERGE_PATH"),
    ({"TRAIN_ITERS": "5", "LR_WARMUP_ITERS": "5"}, "must be below LR_DECAY_ITERS=5 (Megatron-LM)"),
]
ALL_REFUSED = [("1.3B", {**DRY_RUN, **settings}, message) for settings, message in REFUSED]
ALL_REFUSED += [
    ("lm-1.3B", {**LM_SETTINGS["lm-1.3B"], **settings}, message) for settings, message in LM_REFUSED
]


@pytest.mark.parametrize(
    ("size", "settings", "message"), ALL_REFUSED, ids=[f"{s}-{m[:50]}" for s, _, m in ALL_REFUSED]
)
def test_bad_settings_are_refused_before_anything_starts(size, settings, message, check_refused):
    check_refused(size, message, settings)


def test_megatron_deepspeed_without_tensorboard_is_refused(tmp_path, monkeypatch, capsys):
    """It would train on without; the trainer refuses it by itself."""
    for suffix in (".bin", ".idx"):
        (tmp_path / "data").with_suffix(suffix).write_text("tokens")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("launch_job.supervise", lambda *_: pytest.fail("it was started"))
    settings = {"TENSORBOARD_DIR": "tb", "DATA_PATH": str(tmp_path / "data"), **MDS}
    assert start("tiny", **settings) == 2
    assert "TENSORBOARD_DIR tb needs the package tensorboard" in capsys.readouterr().err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):
    """Starts a script up to its launcher: the launcher's name and the variables it would get."""

    def run(size: str, **settings: str) -> tuple[str, dict[str, str]]:
        calls = []
        monkeypatch.setattr("launch_job.supervise", lambda *call: calls.append(call) or 0)
        assert start(size, **settings) == 0
        ((launcher, command, _, variables, _),) = calls
        assert command[0] == launcher
        return launcher, variables

    return run


@pytest.mark.parametrize(
    ("size", "settings", "expected"),
    [
        ("tiny", {}, {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}),
        ("tiny", {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}),
        ("tiny", {"MP_SIZE": "2", "NUM_GPUS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("lm-tiny", {"MP_SIZE": "2"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("lm-tiny", {"MP_SIZE": "1"}, {}),
    ],
)
def test_the_launcher_starts_with_the_variables(size, settings, expected, started, tmp_path):
    settings |= {"OUTPUT_HOME": str(tmp_path)}
    if size == "lm-tiny":
        more = {"DRY_RUN": "0", "NUM_GPUS": "8", "BATCH_SIZE": "1"}
        settings = {**LM_SETTINGS[size], **more, **settings}
    launcher, variables = started(size, **settings)
    assert launcher == ("torchrun" if size == "lm-tiny" else "deepspeed")
    one_queue = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert variables.items() >= expected.items()
    assert (one_queue in variables) is (one_queue in expected)
    assert variables["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


MISSPELT = {
    "SEQ_LENGHT": "SEQ_LENGTH",
    "SEQ_LEN": "SEQ_LENGTH",
    "ULYSES_DEGRE": "ULYSSES_DEGREE",
    "SP_SIZ": "SP_SIZE",
    "TP_SIZE": "MP_SIZE",
    "MICRO_BATCH_SIZE": "BATCH_SIZE",
    "USP_LAYUOT": "USP_LAYOUT",
    "DRY_RUNN": "DRY_RUN",
    "MEGATRON_DEEPSPEED_PAHT": "MEGATRON_DEEPSPEED_PATH",
}
# What shells, containers, schedulers, CI, launchers and clouds export.
ORDINARY = """
    PATH HOME USER LOGNAME SHELL SHLVL PWD OLDPWD TERM LANG LC_ALL TZ HOSTNAME HOSTTYPE HOST MAIL
    EDITOR PAGER LESS LINES COLUMNS DISPLAY TMPDIR TMP TEMP PS1 MANPATH INFOPATH LD_LIBRARY_PATH
    LD_PRELOAD LIBRARY_PATH CPATH PKG_CONFIG_PATH PYTHONPATH PYTHONHOME PYTHONUNBUFFERED VIRTUAL_ENV
    CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_SHLVL MODULEPATH MODULESHOME LOADEDMODULES LMOD_DIR CC CXX
    CFLAGS LDFLAGS MAKEFLAGS SSH_CLIENT SSH_TTY SSH_CONNECTION SSH_AUTH_SOCK XDG_RUNTIME_DIR
    CUDA_HOME CUDA_PATH CUDA_VERSION CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING
    CUDA_DEVICE_MAX_CONNECTIONS NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NCCL_DEBUG
    NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_VERSION NCCL_P2P_LEVEL GLOO_SOCKET_IFNAME UCX_TLS
    TORCH_CUDA_ARCH_LIST TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_ASYNC_ERROR_HANDLING TORCHELASTIC_RUN_ID
    PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS MKL_NUM_THREADS KMP_AFFINITY TRITON_CACHE_DIR
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK
    ROLE_NAME ROLE_WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT NODE_RANK NNODES
    DS_ACCELERATOR DS_BUILD_OPS PDSH_RCMD_TYPE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK
    PMI_SIZE PMIX_RANK SLURM_JOB_ID SLURM_JOBID SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS
    SLURM_NNODES SLURM_NPROCS SLURM_JOB_NODELIST SLURM_GPUS_ON_NODE SLURM_TASKS_PER_NODE
    SLURM_CPUS_PER_TASK SBATCH_ACCOUNT SRUN_DEBUG GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES PBS_JOBID
    PBS_NODEFILE LSB_JOBID LSB_HOSTS HF_HOME HF_TOKEN TRANSFORMERS_CACHE WANDB_API_KEY WANDB_MODE
    WANDB_PROJECT WANDB_DIR KUBERNETES_PORT KUBERNETES_SERVICE_HOST AWS_REGION AWS_DEFAULT_REGION
    GITHUB_ACTIONS GITHUB_SHA RUNNER_TEMP CI CI_JOB_ID BUILD_NUMBER JOB_NAME JENKINS_HOME NODE_NAME
    USP_NO_INSTALL USP_PYTHON FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED GIT_DIR GIT_EDITOR HTTP_PROXY
    HTTPS_PROXY NO_PROXY PIP_INDEX_URL SSL_CERT_FILE XLA_FLAGS TF_CPP_MIN_LOG_LEVEL NUM_CPUS NPROC
    JAVA_HOME GOPATH MODEL_NAME MODEL_PATH DATA_DIR DATASET_PATH OUTPUT_DIR LOG_DIR LOG_LEVEL
    EXPERIMENT_NAME PROJECT PARTITION ACCOUNT DEBUG VERBOSE SEED BATCH PORT VERSION MODE CONFIG
"""


def test_a_misspelt_setting_is_found_among_ordinary_variables():
    from launch_settings import misspelt_setting

    assert misspelt_setting(ORDINARY.split()) is None
    for folder in ("transformers_sft", "diffusion"):
        text = (ROOT / "examples_deepspeed" / folder / "launch.sh").read_text(encoding="utf-8")
        others = [name.upper() for name in re.findall(r"^setting (\w+)", text, re.MULTILINE)]
        assert "ULYSSES_DEGREE" in others and misspelt_setting(ORDINARY.split(), others) is None
    for variable, setting in MISSPELT.items():
        assert misspelt_setting([*ORDINARY.split(), variable]) == (variable, setting)


def test_refused_starts_touch_no_folder(tmp_path):
    """By the settings, and by the trainer's own checks of its arguments."""
    for arguments, settings, message in (
        ((), {"SEQ_LENGHT": "65536"}, "error: SEQ_LENGHT is no setting; did you mean SEQ_LENGTH?"),
        (("--seq-lenght", "64"), {}, "pretrain_gpt_usp.py: error: there is no flag --seq-lenght;"),
    ):
        done = bash("tiny", *arguments, cwd=tmp_path, **settings)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(message) and done.stderr.count("\n") == 1, done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_second_start_keeps_the_log_of_the_first(tmp_path):
    """A stub of torchrun prints when it is started."""
    programs, output = tmp_path / "programs", tmp_path / "output"
    programs.mkdir()
    (programs / "torchrun").write_text('#!/bin/sh\necho "started with $2 node"; exit 7\n')
    (programs / "torchrun").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    for _ in range(2):
        done = bash("tiny", LAUNCHER="torchrun", OUTPUT_HOME=str(output), PATH=path)
        assert done.returncode == 7, done.stderr  # the launcher's
    (log,) = output.glob("log/*.log")
    assert [line[:4] for line in log.read_text().splitlines()] == ["=== ", "star"] * 2


def test_a_dry_run_refuses_what_the_start_refuses(capsys):
    """By the trainer's own checks, which know more than the settings."""
    settings = {"PRECISION": "bf16", "ZERO_STAGE": "0", **DRY_RUN}
    assert start("tiny", **settings) == 1
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith("ConfigError: bf16 with ZeRO-0"), errors


# A launcher as DeepSpeed's: a process that answers 0 where its child was killed, and that child,
# which starts the ranks.
LAUNCHER = """
import os, signal, subprocess, sys, time
role, folder = sys.argv[1:]
def started(name, **variables):
    command = [sys.executable, "-S", __file__, name, folder]
    return subprocess.Popen(command, env={**os.environ, **variables})
def note(name):
    open(f"{folder}/{name}_", "w").write(str(os.getpid()))
    os.rename(f"{folder}/{name}_", f"{folder}/{name}")
if role == "torchrun":
    note("outer")
    child = started("agent")
    sys.exit(max(child.wait(), 0))
elif role == "agent":
    note("agent")
    ranks = [started("rank", RANK=str(rank)) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks) and 1)
def stop(number, _):
    note(f"{signal.Signals(number).name}_{os.environ['RANK']}")
    open(os.environ["USP_STOPPED_FILE"], "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, stop)
note("rank_" + os.environ["RANK"])
os.write(1, b"rank\\n")
time.sleep(60)
"""
SUPERVISE = """
import os, sys
from usp_trainer.signals import supervise
command = [sys.executable, "-S", sys.argv[1], "torchrun", "."]
sys.exit(supervise("torchrun", command, "log", dict(os.environ)))
"""


@pytest.mark.parametrize(
    ("number", "target", "code", "noted", "line"),
    [
        ("TERM", "script", 75, "SIGTERM", "SIGTERM: passed on to 2 ranks"),
        ("INT", "script", 75, "SIGTERM", "SIGTERM: passed on to 2 ranks"),
        ("USR1", "script", 75, "SIGUSR1", "SIGUSR1: passed on to 2 ranks"),
        ("HUP", "script", 129, None, ""),
        ("USR1", "other script", 75, "SIGTERM", "SIGTERM: passed on to 2 ranks"),
        ("KILL", "agent", 75, "SIGTERM", "error: torchrun left 2 ranks behind, which were ended"),
        ("KILL", "outer", 75, "SIGTERM", "error: torchrun was killed (SIGKILL)"),
    ],
)
def test_a_signal_to_a_script_or_its_launcher(number, target, code, noted, line, tmp_path):
    """No rank goes on without its launcher, and no launcher that was killed has succeeded."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    command = [sys.executable, "-c", SUPERVISE, "launcher.py"]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    if target == "other script":
        command = ["bash", str(ROOT / "examples_deepspeed/diffusion/generate_tiny_usp_cpu.sh")]
        launcher = f"exec {sys.executable} -S {tmp_path}/launcher.py torchrun {tmp_path}"
        executable(tmp_path / "torchrun", launcher)
        settings = environment(PATH=f"{tmp_path}{os.pathsep}{environment()['PATH']}")
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    names = ("outer", "agent", "rank_0", "rank_1")
    deadline = time.monotonic() + 30
    while not all((tmp_path / name).exists() for name in names):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    pids = {name: int((tmp_path / name).read_text()) for name in names}
    pids |= {"script": process.pid, "other script": process.pid}
    time.sleep(0.5)  # the script has seen its ranks
    os.kill(pids[target], signal.Signals[f"SIG{number}"])
    out, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert out == "rank\n" * 2
    assert target == "other script" or (tmp_path / "log").read_text().startswith(out)
    assert line in errors and errors.count("\n") == bool(line), errors
    noted_by = {path.name for path in tmp_path.glob("SIG*")}
    assert noted_by == ({f"{noted}_{rank}" for rank in range(2)} if noted else set())
    for pid in pids.values():  # ended, if perhaps not waited for by what adopted it
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_task_of_srun_is_a_rank():
    program = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))"
    task = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}
    done = subprocess.run(
        ["bash", str(FOLDER / "srun_rank.sh"), sys.executable, "-S", "-c", program],
        env={**os.environ, **task},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "9 1 16\n", done.stderr


def test_the_example_job_names_a_script():
    lines = (FOLDER / "slurm.sbatch").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("bash ")]
    assert line.split()[1] in SCRIPTS.values()


@pytest.mark.megatron_lm
@pytest.mark.slow
@pytest.mark.skipif(not MEGATRON_LM, reason="MEGATRON_LM_PATH is not set")
def test_the_tiny_script_trains_and_continues_from_its_checkpoint(tmp_path):
    settings = {"MEGATRON_LM_PATH": MEGATRON_LM, "OUTPUT_HOME": str(tmp_path), "LOG_INTERVAL": "1"}
    settings |= {"LR_DECAY_ITERS": "20", "SAVE_INTERVAL": "3", "CUDA_VISIBLE_DEVICES": ""}
    losses: dict[int, float] = {}
    for steps in ("3", "6"):
        run = {**settings, "TRAIN_ITERS": steps, "MASTER_PORT": free_port()}
        done = bash("lm-tiny", timeout=600, **run)
        assert done.returncode == 0, done.stderr or done.stdout[-3000:]
        lines = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", done.stdout)
        assert not losses or min(int(step) for step, _ in lines) == 4
        losses |= {int(step): float(loss) for step, loss in lines}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1] - 0.3


if __name__ == "__main__":
    for case in CASES:
        golden(*case).write_text(printed(*case))
