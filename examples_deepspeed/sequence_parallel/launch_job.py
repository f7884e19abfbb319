"""Builds and runs the launcher's command from the settings of a script that sources ``launch.sh``.

``launch.sh`` passes the script's variables as ``NAME=VALUE``, then ``--``, then the script's
arguments. A variable of the environment with a setting's name in capitals overrides the setting.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch_programs import HERE, program_of
from launch_settings import FLAGS, in_settings_names, read_settings
from usp_trainer.arguments import build_parser
from usp_trainer.environment import variables
from usp_trainer.validate_args import validate_flags

from ds_usp import ConfigError, DataError, USPError, allocator_variables
from ds_usp.planner import AUTO

ENCODE = (
    "Make it: python tools/preprocess_data.py (in the checkout) with --input text.jsonl "
    "--output-prefix my --vocab-file VOCAB --merge-file MERGES --tokenizer-type GPT2BPETokenizer "
    "--append-eod --workers 8, then DATA_PATH=my_text_document"
)

# Flags that keep tensors in host memory.
KEEPS_HOST_MEMORY = ("--usp-offload-ratio", "--usp-states-on-host")


class Job:
    """The command, files and environment of one training.

    Args:
        settings: as :func:`read_settings` returns them.
        arguments: of the script, passed to the training program.
        environment: of the script.

    Attributes:
        command: of the launcher.
        log, config: paths of the log and of DeepSpeed's configuration file.

    Raises:
        USPError: settings that contradict each other, or files that do not exist.
    """

    def __init__(
        self, settings: dict[str, str], arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.settings, self.arguments, self.environment = settings, arguments, environment
        self.is_dry_run = settings["dry_run"] == "1"
        self.program = program_of(settings)
        self.is_on_cpu = settings["device"] == "cpu"
        sizes = (int(settings[name]) for name in ("mp_size", "sp_size", "pp_size"))
        self.ranks_per_replica = math.prod(sizes)
        self._count_steps()
        self._find_nodes()
        self._count_gpus()
        self._check_flags()
        data = self.program.data()
        self.program.check()
        s = settings
        name = (
            f"gpt_{s['model_size']}B_s{s['seq_length']}_gbs{s['global_batch_size']}"
            f"_mbs{s['batch_size']}_g{self.world_size}_z{s['zero_stage']}_sp{s['sp_size']}"
            f"_u{s['ulysses_degree']}_mp{s['mp_size']}_pp{s['pp_size']}_seed{s['seed']}"
        )
        name += self.program.suffix  # the programs write other checkpoints
        output = s["output_home"]
        node = "" if self.node_rank == "0" else f"_node{self.node_rank}"
        self.checkpoint, self.output = f"{output}/checkpoint/{name}", f"{output}/{name}"
        self.config, self.log = f"{output}/config/{name}.json", f"{output}/log/{name}{node}.log"
        paths = {"checkpoint": self.checkpoint, "output": self.output, "config": self.config}
        self.flags = [*self.program.flags(data, paths), *arguments]
        self.command = [*self._launcher(), *self.program.command(), *self.flags]

    def _count_steps(self) -> None:
        """Convert tokens to steps: both programs count steps."""
        s = self.settings
        if s["train_iters"]:
            s["lr_decay_iters"] = s["lr_decay_iters"] or s["train_iters"]
            s["lr_warmup_iters"] = s["lr_warmup_iters"] or str(int(s["train_iters"]) // 100)
        for iters, tokens, unit in (
            ("train_iters", "train_tokens_in_billion", 10**9),
            ("lr_decay_iters", "lr_decay_tokens_in_billion", 10**9),
            ("lr_warmup_iters", "lr_warmup_tokens_in_million", 10**6),
        ):
            if not s[iters]:
                if not s[tokens]:
                    raise ConfigError(f"{tokens.upper()} is not set; set it or TRAIN_ITERS")
                tokens_per_step = int(s["seq_length"]) * int(s["global_batch_size"])
                s[iters] = str(int(s[tokens]) * unit // tokens_per_step)
        warmup, decay = int(s["lr_warmup_iters"]), int(s["lr_decay_iters"])
        if self.program.checkout and warmup >= decay:
            raise ConfigError(
                f"LR_WARMUP_ITERS={warmup} must be below LR_DECAY_ITERS={decay} "
                f"({self.program.title}). Use LR_WARMUP_ITERS={decay // 100}"
            )

    def _find_nodes(self) -> None:
        """Set the node's rank, the number of nodes and the master address from the settings."""
        s, launcher = self.settings, self.settings["launcher"]
        if launcher not in self.program.launchers:
            raise ConfigError(
                f"LAUNCHER={launcher} does not start {self.program.title}. Use "
                f"LAUNCHER={' or '.join(self.program.launchers)}"
            )
        self.node_rank, self.nodes = s["node_rank"] or "0", int(s["nnodes"] or 1)
        self.master_addr = s["master_addr"] or "127.0.0.1"
        if launcher == "deepspeed":
            if self.nodes != 1:
                raise ConfigError(
                    f"NNODES={self.nodes} is for LAUNCHER=torchrun or srun; DeepSpeed's launcher "
                    "needs HOSTFILE"
                )
            self.node_rank = "0"
        elif s["hostfile"]:
            raise ConfigError(f"HOSTFILE is for LAUNCHER=deepspeed, not {launcher}")
        elif launcher == "srun":
            self._find_slurm_nodes()
        elif self.nodes > 1 and not (s["master_addr"] and s["node_rank"]):
            raise ConfigError(
                f"NNODES={self.nodes} needs MASTER_ADDR, a name of the first node, and NODE_RANK, "
                f"from 0 to {self.nodes - 1}; start the script on every node"
            )
        elif int(self.node_rank) >= self.nodes:
            raise ConfigError(f"NODE_RANK={self.node_rank} must be from 0 to {self.nodes - 1}")

    def _find_slurm_nodes(self) -> None:
        """Set rank, number and master address of the nodes from the settings or the SLURM job."""
        s, env = self.settings, self.environment
        if not (env.get("SLURM_JOB_ID") or self.is_dry_run):
            raise ConfigError(
                "LAUNCHER=srun needs a SLURM job (SLURM_JOB_ID is not set): sbatch slurm.sbatch"
            )
        self.node_rank = "0"  # srun starts the tasks of all nodes from this one
        self.nodes = int(s["nnodes"] or env.get("SLURM_NNODES") or 1)
        node_list = env.get("SLURM_JOB_NODELIST")
        self.master_addr = s["master_addr"]
        if not self.master_addr and node_list:
            self.master_addr = self._output("scontrol", "show", "hostnames", node_list).split()[0]
        self.master_addr = self.master_addr or socket.gethostname()

    def _output(self, *command: str) -> str:
        """The output of a command; "" if it is not installed or fails."""
        if not shutil.which(command[0], path=self.environment.get("PATH")):
            return ""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.run(command, env=self.environment, text=True, **pipes).stdout

    def _count_gpus(self) -> None:
        """Ranks per node, and of all nodes: GPUs of the host file, visible GPUs, this node's GPUs,
        or CPU processes."""
        s, dry_run = self.settings, self.is_dry_run
        per_replica = -(-self.ranks_per_replica // self.nodes)
        visible = self.environment.get("CUDA_VISIBLE_DEVICES", "")
        self.leaves_gpus_to_launcher = False
        if s["hostfile"]:
            self.world_size = self.ranks_per_node = _count_slots(s["hostfile"], s["num_gpus"])
            return
        if self.is_on_cpu:
            count = int(s["num_gpus"] or per_replica)
        elif visible:
            if s["num_gpus"]:
                raise ConfigError("CUDA_VISIBLE_DEVICES names the GPUs: leave NUM_GPUS out")
            count = len(visible.split(","))
            self.leaves_gpus_to_launcher = True
        else:
            count = int(
                s["num_gpus"] or len(self._output("nvidia-smi", "--list-gpus").splitlines())
            )
            if not count and not dry_run:
                raise ConfigError("no GPU here. Set NUM_GPUS, or DEVICE=cpu")
            count = count or per_replica
        self.ranks_per_node, self.world_size = count, count * self.nodes

    def _check_flags(self) -> None:
        """The trainer's checks of flags that both programs have, in the names of the settings."""
        s = self.settings
        if int(s["pp_size"]) > 1 and int(s["zero_stage"]) > 1:
            raise ConfigError(
                f"ZERO_STAGE={s['zero_stage']} is not supported with a pipeline. Use ZERO_STAGE=1 "
                "or PP_SIZE=1"
            )
        s["num_kv_heads"] = s["num_kv_heads"] or s["num_attn_heads"]
        degree = s["ulysses_degree"]
        args = build_parser().parse_args(
            [flag.format(**s | {"ulysses_degree": degree or AUTO}) for flag in FLAGS.split()]
        )
        args.ulysses_degree = None if degree in ("", AUTO) else int(degree)
        validate_flags(args, self.world_size)
        s["ulysses_degree"] = degree or str(args.ulysses_degree)

    def _launcher(self) -> list[str]:
        """Command of torchrun, srun or DeepSpeed that starts the ranks, without the program."""
        s, port = self.settings, self.settings["master_port"]
        if s["launcher"] == "torchrun":
            command = ["torchrun", "--nnodes", self.nodes, "--node-rank", self.node_rank]
            command += ["--nproc-per-node", self.ranks_per_node]
            command += ["--master-addr", self.master_addr, "--master-port", port]
        elif s["launcher"] == "srun":
            command = ["env", f"MASTER_ADDR={self.master_addr}", f"MASTER_PORT={port}"]
            ranks = self.ranks_per_node
            command += [f"LOCAL_WORLD_SIZE={ranks}", f"LOCAL_SIZE={ranks}", "srun"]
            command += ["--nodes", self.nodes, "--ntasks-per-node", ranks]
            command += ["--kill-on-bad-exit=1", "bash", HERE / "srun_rank.sh", "python"]
        else:
            command = ["deepspeed", "--log_level", "error", "--master_port", port]
            if s["hostfile"]:
                command += ["--hostfile", s["hostfile"]]
            elif not self.leaves_gpus_to_launcher:  # which reads CUDA_VISIBLE_DEVICES itself
                command += ["--num_gpus", self.ranks_per_node]
        return list(map(str, command))

    def create_files(self) -> None:
        """Create the output folders, DeepSpeed's configuration file and the header of the log."""
        for folder in (Path(self.log).parent, Path(self.config).parent, Path(self.checkpoint)):
            folder.mkdir(parents=True, exist_ok=True)
        if self.program.config():
            Path(self.config).write_text(self.program.config())
        with Path(self.log).open("a") as log:  # logs of earlier starts are kept
            print("===", time.strftime("%Y-%m-%d %H:%M:%S"), socket.gethostname(), file=log)

    def text(self) -> str:
        """The command with one flag per line, and DeepSpeed's configuration."""
        lines: list[str] = []
        for argument in self.command:
            if lines and not (argument.startswith("--") or argument.endswith(".py")):
                lines[-1] += f" {shlex.quote(argument)}"
            else:
                lines.append(shlex.quote(argument))
        text = " \\\n    ".join(lines)
        config = self.program.config().rstrip()
        return text + (f"\n\n# {self.config}\n{config}" if config else "")

    def exports(self) -> dict[str, str]:
        """Variables for the training processes; those that are set already stay, and what is named
        in the one of torch's allocators."""
        # FlashAttention-4 compiles kernels at the first step; a disk cache saves later starts that.
        variables = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
        if self.program.needs_one_queue() or "--sequence-parallel" in self.arguments:
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if self.is_on_cpu:
            variables["OMP_NUM_THREADS"] = "1"
        kept = {name: value for name, value in variables.items() if name not in self.environment}
        if self.is_on_cpu:
            return kept | {"DS_ACCELERATOR": "cpu"}
        names = {argument.partition("=")[0] for argument in self.arguments}
        if self.program.checkout and names.intersection(
            KEEPS_HOST_MEMORY
        ):  # the trainer does it itself
            kept |= allocator_variables(self.environment, expandable_segments=True)
        return kept


def _count_slots(hostfile: str, num_gpus: str) -> int:
    """GPUs of all nodes of a DeepSpeed host file."""
    if num_gpus:
        raise ConfigError("HOSTFILE counts the GPUs of every node: leave NUM_GPUS out")
    if not Path(hostfile).is_file():
        raise ConfigError(f"HOSTFILE={hostfile} does not exist; a line is: worker-0 slots=8")
    slots = sum(map(int, re.findall(r"slots=(\d+)", Path(hostfile).read_text())))
    if not slots:
        raise ConfigError(f"HOSTFILE={hostfile} names no slots; a line is: worker-0 slots=8")
    return slots


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Print the command, or check everything that can be checked and run it.

    Args:
        argv: the script's variables as NAME=VALUE, ``--``, and the script's arguments.

    Returns:
        2 if a setting is refused, or the exit code of the trainer's own checks.
    """
    count = argv.index("--")
    script = dict(assignment.split("=", 1) for assignment in argv[:count])
    try:
        job = Job(read_settings(script, environment), argv[count + 1 :], environment)
    except USPError as error:
        encode = f". {ENCODE}" if isinstance(error, DataError) else ""
        print(f"error: {in_settings_names(str(error))}{encode}", file=sys.stderr)
        return 2
    if job.is_dry_run:
        print(job.text())
        return 0
    launcher = job.settings["launcher"]
    if not shutil.which(launcher, path=environment.get("PATH")):
        print(f"error: there is no {launcher} on PATH. Run: . scripts/env.sh", file=sys.stderr)
        return 2
    code = job.program.check_flags(job.flags, job.world_size)
    if code:
        return code
    job.create_files()
    teed = ["bash", "-c", 'set -o pipefail; "$@" 2>&1 | tee -a "$0"', job.log, *job.command]
    return os.execvpe("bash", teed, {**environment, **job.exports()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], variables()))
