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
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import launch_settings as flags_of
from launch_settings import FLAGS, OPTIONAL_FLAGS, in_settings_names, read_settings
from pretrain_gpt_usp import main as check_trainer
from usp_trainer.arguments import build_parser
from usp_trainer.environment import variables
from usp_trainer.run_files import check_packages, find_data
from usp_trainer.validate_args import validate_flags

from ds_usp import ConfigError, DataError, USPError, allocator_variables
from ds_usp.planner import AUTO
from ds_usp.settings import SETTINGS

HERE = Path(__file__).resolve().parent

ENCODE = (
    "Make it: python tools/preprocess_data.py (in the checkout) with --input text.jsonl "
    "--output-prefix my --vocab-file VOCAB --merge-file MERGES --tokenizer-type GPT2BPETokenizer "
    "--append-eod --workers 8, then DATA_PATH=my_text_document"
)

KEEPS_HOST_MEMORY = tuple(row.flag for row in SETTINGS if row.keeps_host_memory)


class Job:
    """The command, files and environment of one training; what differs between the programs is in
    the subclasses.

    Args:
        settings: as ``read_settings`` returns them; derived ones are added.
        arguments: of the script, passed to the training program.
        environment: of the script.

    Attributes:
        suffix: end of a run's name; the programs write other checkpoints.
        launchers: values of LAUNCHER that start the program.
        latest: file of the checkpoint folder that names the newest checkpoint.
        checkout_setting, checkout: of the framework's checkout, name and path; empty for none.

    Raises:
        USPError: settings that contradict each other, or files that do not exist.
    """

    title = suffix = checkout_setting = ""
    launchers: tuple[str, ...] = ("deepspeed", "torchrun", "srun")
    latest = "latest"

    def __init__(
        self, settings: dict[str, str], arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.settings, self.arguments, self.environment = settings, arguments, environment
        self.is_dry_run = settings["dry_run"] == "1"
        self.is_on_cpu = settings["device"] == "cpu"
        self.recomputes = settings["activation_checkpoint"] == "true"
        self.is_encoded = False
        self.checkout = settings[self.checkout_setting] if self.checkout_setting else ""
        sizes = (int(settings[name]) for name in ("mp_size", "sp_size", "pp_size"))
        self.ranks_per_replica = math.prod(sizes)
        self._count_steps()
        self._find_nodes()
        self._count_gpus()
        self._check_flags()
        data = self._data()
        self._check_program()
        s = settings
        name = (
            f"gpt_{s['model_size']}B_s{s['seq_length']}_gbs{s['global_batch_size']}"
            f"_mbs{s['batch_size']}_g{self.world_size}_z{s['zero_stage']}_sp{s['sp_size']}"
            f"_u{s['ulysses_degree']}_mp{s['mp_size']}_pp{s['pp_size']}_seed{s['seed']}"
        )
        name += self.suffix
        output = s["output_home"]
        node = "" if self.node_rank == "0" else f"_node{self.node_rank}"
        self.checkpoint, self.output = f"{output}/checkpoint/{name}", f"{output}/{name}"
        self.config, self.log = f"{output}/config/{name}.json", f"{output}/log/{name}{node}.log"
        self.flags = [*self._program_flags(data), *arguments]
        self.command = [*self._launcher(), *self._program(), *self.flags]

    def _count_steps(self) -> None:
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
        if self.checkout and warmup >= decay:
            raise ConfigError(
                f"LR_WARMUP_ITERS={warmup} must be below LR_DECAY_ITERS={decay} "
                f"({self.title}). Use LR_WARMUP_ITERS={decay // 100}"
            )

    def _find_nodes(self) -> None:
        s, launcher = self.settings, self.settings["launcher"]
        if launcher not in self.launchers:
            raise ConfigError(
                f"LAUNCHER={launcher} does not start {self.title}. Use "
                f"LAUNCHER={' or '.join(self.launchers)}"
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
            env, node_list = self.environment, self.environment.get("SLURM_JOB_NODELIST")
            if not (env.get("SLURM_JOB_ID") or self.is_dry_run):
                raise ConfigError(
                    "LAUNCHER=srun needs a SLURM job (SLURM_JOB_ID is not set): sbatch slurm.sbatch"
                )
            self.node_rank = "0"  # srun starts the tasks of all nodes from this one
            self.nodes = int(s["nnodes"] or env.get("SLURM_NNODES") or 1)
            if not s["master_addr"]:
                names = ("scontrol", "show", "hostnames", node_list) if node_list else ("true",)
                self.master_addr = [*self._output(*names).split(), socket.gethostname()][0]
        elif self.nodes > 1 and not (s["master_addr"] and s["node_rank"]):
            raise ConfigError(
                f"NNODES={self.nodes} needs MASTER_ADDR, a name of the first node, and NODE_RANK, "
                f"from 0 to {self.nodes - 1}; start the script on every node"
            )
        elif int(self.node_rank) >= self.nodes:
            raise ConfigError(f"NODE_RANK={self.node_rank} must be from 0 to {self.nodes - 1}")

    def _output(self, *command: str) -> str:
        if not shutil.which(command[0], path=self.environment.get("PATH")):
            return ""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.run(command, env=self.environment, text=True, **pipes).stdout

    def _count_gpus(self) -> None:
        s, dry_run = self.settings, self.is_dry_run
        per_replica = -(-self.ranks_per_replica // self.nodes)
        visible = self.environment.get("CUDA_VISIBLE_DEVICES", "")
        self.leaves_gpus_to_launcher = False
        if s["hostfile"]:
            if s["num_gpus"]:
                raise ConfigError("HOSTFILE counts the GPUs of every node: leave NUM_GPUS out")
            text = Path(s["hostfile"]).read_text() if Path(s["hostfile"]).is_file() else None
            slots = sum(map(int, re.findall(r"slots=(\d+)", text or "")))
            if not slots:
                problem = "does not exist" if text is None else "names no slots"
                raise ConfigError(
                    f"HOSTFILE={s['hostfile']} {problem}; a line is: worker-0 slots=8"
                )
            self.world_size = self.ranks_per_node = slots
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
        for folder in (Path(self.log).parent, Path(self.config).parent, Path(self.checkpoint)):
            folder.mkdir(parents=True, exist_ok=True)
        name = re.sub("_sp[^_]+_u[^_]+_", "_sp*_u*_", Path(self.checkpoint).name)
        others = sorted(Path(self.checkpoint).parent.glob(f"{name}/{self.latest}"))
        if others and not any(flag.partition("=")[0] == "--load" for flag in self.flags):
            print(
                f"{self.checkpoint} is new and starts at step 1. The same run of other degrees has "
                f"a checkpoint: continue it with --load {others[0].parent}"
            )
        for path in (Path(self.config), Path(self.log)):
            if path.is_symlink():  # left by another user of the folder, it may lead anywhere
                path.unlink(missing_ok=True)
        if self.config_text():
            Path(self.config).write_text(self.config_text())
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
        config = self.config_text().rstrip()
        return text + (f"\n\n# {self.config}\n{config}" if config else "")

    def exports(self) -> dict[str, str]:
        """Variables for the training processes; those that are set already stay, and what is named
        in the one of torch's allocators."""
        # FlashAttention-4 compiles kernels at the first step; a disk cache saves later starts that.
        variables = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
        if self._needs_one_queue() or "--sequence-parallel" in self.arguments:
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if self.is_on_cpu:
            variables["OMP_NUM_THREADS"] = "1"
        kept = {name: value for name, value in variables.items() if name not in self.environment}
        if self.is_on_cpu:
            return kept | {"DS_ACCELERATOR": "cpu"}
        names = {argument.partition("=")[0] for argument in self.arguments}
        if self.checkout and names.intersection(KEEPS_HOST_MEMORY):  # the trainer does it itself
            kept |= allocator_variables(self.environment, expandable_segments=True)
        return kept

    def _check_program(self) -> None:
        """Check what the program needs: its script, packages and tokenizer."""

    def _data(self) -> list[str]:
        """The values of ``--data-path``: texts or prefixes, each perhaps after its weight."""
        text = self.settings["data_path"]
        if not text:
            return self._default_data()
        is_one_path = Path(text).is_file() or Path(f"{text}.bin").is_file()
        items = [text] if is_one_path else text.split()
        paths, self.is_encoded = find_data(items)
        if self.checkout and not self.is_encoded:
            raise DataError(f"{self.title} reads encoded data, not {paths[0]!r}")
        return items

    def _default_data(self) -> list[str]:
        raise NotImplementedError

    def _program(self) -> list[str]:
        module = "-m" if self.settings["launcher"] == "srun" else "--module"
        return [module, "megatron_patches.run", f"{self.checkout}/pretrain_gpt.py"]

    def _program_flags(self, data: Sequence[str]) -> list[str]:
        raise NotImplementedError

    def config_text(self) -> str:
        """The content of DeepSpeed's configuration file; empty where none is read."""
        return ""

    def _needs_one_queue(self) -> bool:
        return int(self.settings["mp_size"]) > 1

    def check_flags(self) -> int:
        """The program's own checks, before a folder is created; exit code."""
        return 0

    def _filled(self, *templates: str) -> list[str]:
        return [flag.format(**self.settings) for text in templates for flag in text.split()]

    def _optional_flags(self) -> list[str]:
        s = self.settings
        pairs = re.findall(r"(--\S+) \{(\w+)\}", OPTIONAL_FLAGS)
        return [item for flag, name in pairs if s[name] for item in (flag, s[name])]

    def _checkpoint_flags(self) -> list[str]:
        folder = self.checkpoint
        load = ["--load", folder] if Path(folder, self.latest).is_file() else []
        return ["--save", folder, *load]

    def _deepspeed_flags(self, data: Sequence[str]) -> list[str]:
        """The flags that have the same names in the trainer and in Megatron-DeepSpeed."""
        s, (save, folder, *load) = self.settings, self._checkpoint_flags()
        flags = [*self._filled(FLAGS), save, folder]
        flags += self._filled(
            "--usp-cluster {usp_cluster}" if s["usp_cluster"] else "",
            "--use-rotary-position-embeddings" if s["rotary"] == "true" else "",
            "--bf16" if s["precision"] == "bf16" else "",
        )
        flags += [*load, *(["--data-path", *data] if data else []), *self._optional_flags()]
        is_encoded = self.is_encoded and s["vocab_size"]  # text has its own vocabulary
        return flags + (["--vocab-size", s["vocab_size"]] if is_encoded else [])

    def _check_checkout(self, advice: str) -> None:
        if not Path(self.checkout, "pretrain_gpt.py").is_file():
            raise ConfigError(
                f"{self.checkout_setting.upper()}={self.checkout} has no pretrain_gpt.py: give the "
                f"folder of a checkout{advice}"
            )

    def _check_gpt2_files(self) -> None:
        s = self.settings
        files = (s["vocab_path"], s["merge_path"])
        is_gpt2 = s["tokenizer_type"] == "GPT2BPETokenizer" and not self.is_dry_run
        if is_gpt2 and not all(file and Path(file).is_file() for file in files):
            raise ConfigError(
                "set VOCAB_PATH and MERGE_PATH to the two files of GPT-2's tokenizer, or "
                "TOKENIZER_TYPE=NullTokenizer and VOCAB_SIZE"
            )


class Trainer(Job):
    """The trainer of this folder, ``pretrain_gpt_usp.py``.

    With one queue megatron-core's tensor-parallel all-reduce starts before the GEMM that hides it,
    but copies overlapped with attention wait behind kernels.
    """

    title = "the trainer"

    def _default_data(self) -> list[str]:
        if not (self.is_on_cpu or self.is_dry_run):
            raise DataError("set DATA_PATH to a UTF-8 text file, or to data that Megatron encoded")
        return []

    def _program(self) -> list[str]:
        return [str(HERE / "pretrain_gpt_usp.py")]

    def _program_flags(self, data: Sequence[str]) -> list[str]:
        s = self.settings
        flags = self._deepspeed_flags(data)
        flags += ["--rotary-base", s["rope_theta"], "--device", s["device"]]
        flags += ["--output-dir", self.output]
        return flags + (["--usp-recompute", "full"] if self.recomputes else [])

    def check_flags(self) -> int:
        return check_trainer([*self.flags, "--check-only", "--num-processes", str(self.world_size)])


class MegatronDeepSpeed(Job):
    """``pretrain_gpt.py`` of a checkout of Megatron-DeepSpeed, under the patches."""

    title, suffix = "Megatron-DeepSpeed", "_mds"
    checkout_setting = "megatron_deepspeed_path"

    def _check_program(self) -> None:
        self._check_gpt2_files()
        self._check_checkout(", or unset it to use the trainer of this folder")
        if not self.is_dry_run:
            check_packages(Namespace(**self.settings))

    def _needs_one_queue(self) -> bool:
        return False  # no all-reduce needs it; --sequence-parallel, which does, sets it

    def _default_data(self) -> list[str]:
        if not self.is_dry_run:
            raise DataError("Megatron-DeepSpeed reads encoded data: set DATA_PATH")
        self.is_encoded = True
        return ["my_text_document"]  # shows its position in a dry run

    def _program_flags(self, data: Sequence[str]) -> list[str]:
        s = self.settings
        s["config"] = self.config
        flags = self._deepspeed_flags(data)
        return flags + self._filled(
            flags_of.MEGATRON_FLAGS,
            flags_of.TOKENIZER_FLAGS if s["tokenizer_type"] == "GPT2BPETokenizer" else "",
            f"{flags_of.TENSORBOARD_FLAGS} --log-batch-size-to-tensorboard"
            if s["tensorboard_dir"]
            else "",
            "--no-pipeline-parallel" if s["pp_size"] == "1" else "",
            flags_of.CPU_FLAGS if self.is_on_cpu else "",
            flags_of.RECOMPUTE_FLAGS if self.recomputes else "",
        )

    def config_text(self) -> str:
        text = (HERE / "ds_config_gpt_TEMPLATE.json").read_text()
        derived = {
            "bf16": self.settings["precision"] == "bf16",
            "overlap_comm": self.settings["pp_size"] == "1",  # DeepSpeed's pipeline cannot
        }
        texts = {name: str(value).lower() for name, value in derived.items()}
        for name, value in {**self.settings, **texts}.items():
            text = text.replace(f"@{name.upper()}@", value)
        return text


class MegatronLM(Job):
    """``pretrain_gpt.py`` of a checkout of Megatron-LM, under the patches."""

    title, suffix = "Megatron-LM", "_mlm"
    checkout_setting = "megatron_lm_path"
    launchers = ("torchrun", "srun")
    latest = "latest_checkpointed_iteration.txt"

    def _check_program(self) -> None:
        s = self.settings
        clone = "git clone https://github.com/NVIDIA/Megatron-LM, git checkout core_v0.16.1"
        if not self.checkout:
            raise ConfigError(f"set MEGATRON_LM_PATH to a checkout of Megatron-LM: {clone}")
        self._check_checkout(f" of Megatron-LM: {clone}")
        if int(s["zero_stage"]) > 1:
            raise ConfigError(
                f"ZERO_STAGE={s['zero_stage']}: Megatron-LM has its distributed optimizer "
                "(ZERO_STAGE=1) or none (0). Use ZERO_STAGE=1"
            )
        if s["usp_layout"] not in ("zigzag", "context_parallel"):
            raise ConfigError(
                f"USP_LAYOUT={s['usp_layout']}: Megatron-LM shards batches in an order of its own, "
                "context_parallel. Leave USP_LAYOUT out"
            )
        chunks = 2 * int(s["sp_size"])
        if int(s["sp_size"]) > 1 and int(s["seq_length"]) % chunks:
            tokens = int(s["seq_length"]) // chunks * chunks
            raise ConfigError(
                f"SEQ_LENGTH={s['seq_length']} is not a multiple of 2 x SP_SIZE = {chunks}, which "
                f"Megatron-LM requires. Use SEQ_LENGTH={tokens or chunks}"
            )
        self._check_tokenizer()
        if not s["transformer_impl"]:
            has_te = not self.is_on_cpu and find_spec("transformer_engine")
            s["transformer_impl"] = "transformer_engine" if has_te else "local"
        if not self.is_dry_run:
            check_packages(Namespace(**s))

    def _check_tokenizer(self) -> None:
        s = self.settings
        kind = "NullTokenizer" if s["data_path"] == flags_of.MOCK_DATA else s["tokenizer_type"]
        if kind == "GPT2BPETokenizer":
            self._check_gpt2_files()
        elif kind == "NullTokenizer" and not s["vocab_size"]:
            raise ConfigError("TOKENIZER_TYPE=NullTokenizer and mock data need VOCAB_SIZE")
        elif kind != "NullTokenizer" and not (s["tokenizer_model"] or self.is_dry_run):
            raise ConfigError(
                f"TOKENIZER_TYPE={kind} needs TOKENIZER_MODEL, the tokenizer's folder or file; or "
                "set TOKENIZER_TYPE=NullTokenizer and VOCAB_SIZE"
            )

    def _data(self) -> list[str]:
        return [] if self.settings["data_path"] == flags_of.MOCK_DATA else super()._data()

    def _default_data(self) -> list[str]:
        if not self.is_dry_run:
            raise DataError(
                "Megatron-LM reads encoded data: set DATA_PATH, or "
                f"DATA_PATH={flags_of.MOCK_DATA} for its mock data"
            )
        return ["my_text_document"]

    def _program_flags(self, data: Sequence[str]) -> list[str]:
        s = self.settings
        is_local = s["transformer_impl"] == "local"
        groups = s["num_kv_heads"] != s["num_attn_heads"]
        is_rotary = s["rotary"] == "true"
        flags = self._filled(
            flags_of.MEGATRON_LM_FLAGS,
            "--group-query-attention --num-query-groups {num_kv_heads}" if groups else "",
            "--position-embedding-type rope --rotary-base {rope_theta}" if is_rotary else "",
            "--sequence-parallel" if int(s["mp_size"]) > 1 else "",
            "--use-distributed-optimizer --overlap-param-gather" if s["zero_stage"] == "1" else "",
            "--bf16" if s["precision"] == "bf16" else "",
            flags_of.MEGATRON_LM_LOCAL_FLAGS if is_local else "",
            "" if find_spec("fused_weight_gradient_mlp_cuda") else flags_of.NO_GRADIENT_FUSION,
            flags_of.MEGATRON_LM_CPU_FLAGS if self.is_on_cpu else "",
            flags_of.MEGATRON_LM_RECOMPUTE_FLAGS if self.recomputes else "",
            flags_of.TENSORBOARD_FLAGS if s["tensorboard_dir"] else "",
            "--usp-cluster {usp_cluster}" if s["usp_cluster"] else "",
        )
        flags += self._checkpoint_flags() + self._optional_flags()
        return flags + (["--data-path", *data] if data else ["--mock-data"]) + self._tokenizer()

    def _tokenizer(self) -> list[str]:
        s = self.settings
        if s["data_path"] == flags_of.MOCK_DATA or s["tokenizer_type"] == "NullTokenizer":
            return ["--tokenizer-type", "NullTokenizer", "--vocab-size", s["vocab_size"]]
        flags = ["--tokenizer-type", s["tokenizer_type"]]
        if s["tokenizer_type"] == "GPT2BPETokenizer":
            return [*flags, *self._filled(flags_of.TOKENIZER_FLAGS)]
        return [*flags, "--tokenizer-model", s["tokenizer_model"] or "my_tokenizer"]


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
        settings = read_settings(script, environment)
        program: type[Job] = MegatronDeepSpeed if settings["megatron_deepspeed_path"] else Trainer
        program = MegatronLM if settings["usp_framework"] == "megatron_lm" else program
        job = program(settings, argv[count + 1 :], environment)
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
    code = job.check_flags()
    if code:
        return code
    job.create_files()
    teed = ["bash", "-c", 'set -o pipefail; "$@" 2>&1 | tee -a "$0"', job.log, *job.command]
    return os.execvpe("bash", teed, {**environment, **job.exports()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], variables()))
