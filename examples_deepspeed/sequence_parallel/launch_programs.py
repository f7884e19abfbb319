"""The programs that the scripts can start: their flags, data, checks and configuration."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from launch_settings import (
    CPU_FLAGS,
    FLAGS,
    MEGATRON_FLAGS,
    MEGATRON_LM_CPU_FLAGS,
    MEGATRON_LM_FLAGS,
    MEGATRON_LM_LOCAL_FLAGS,
    MEGATRON_LM_RECOMPUTE_FLAGS,
    MOCK_DATA,
    NO_GRADIENT_FUSION,
    OPTIONAL_FLAGS,
    RECOMPUTE_FLAGS,
    TENSORBOARD_FLAGS,
    TOKENIZER_FLAGS,
)
from pretrain_gpt_usp import main as check_trainer
from usp_trainer.run_files import check_packages, find_data

from ds_usp import ConfigError, DataError

HERE = Path(__file__).resolve().parent


def program_of(settings: dict[str, str]) -> Program:
    """The program that the settings select."""
    if settings["usp_framework"] == "megatron_lm":
        return MegatronLM(settings)
    return (MegatronDeepSpeed if settings["megatron_deepspeed_path"] else Trainer)(settings)


class Program:
    """What differs between the programs.

    Args:
        settings: as ``read_settings`` returns them; ``Job`` adds derived ones before :meth:`flags`.

    Attributes:
        title: name in messages.
        suffix: end of a run's name; the programs write other checkpoints.
        launchers: values of LAUNCHER that start it.
        latest: file of the checkpoint folder that names the newest checkpoint.
        checkout: path of the framework's checkout; empty for the trainer.
    """

    title = ""
    suffix = ""
    launchers: tuple[str, ...] = ("deepspeed", "torchrun", "srun")
    latest = "latest"

    def __init__(self, settings: dict[str, str]) -> None:
        self.settings = settings
        self.is_dry_run = settings["dry_run"] == "1"
        self.is_on_cpu = settings["device"] == "cpu"
        self.is_encoded = False
        self.checkout = ""

    def check(self) -> None:
        """Check what the program needs: its script, packages and tokenizer."""

    def data(self) -> list[str]:
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

    def command(self) -> list[str]:
        """The part of the command between the launcher and the flags."""
        module = "-m" if self.settings["launcher"] == "srun" else "--module"
        return [module, "megatron_patches.run", f"{self.checkout}/pretrain_gpt.py"]

    def flags(self, data: Sequence[str], paths: Mapping[str, str]) -> list[str]:
        """The flags, without the arguments of the script.

        Args:
            paths: the run's ``checkpoint`` and ``output`` folders, and its ``config`` file.
        """
        raise NotImplementedError

    def config(self) -> str:
        """The content of DeepSpeed's configuration file; empty where none is read."""
        return ""

    def needs_one_queue(self) -> bool:
        """Whether the GPU may have one hardware queue only (CUDA_DEVICE_MAX_CONNECTIONS)."""
        return False

    def check_flags(self, flags: Sequence[str], ranks: int) -> int:
        """The program's own checks, before a folder is created; exit code."""
        return 0

    def _filled(self, *templates: str) -> list[str]:
        return [flag.format(**self.settings) for text in templates for flag in text.split()]

    def _optional_flags(self) -> list[str]:
        """The flags whose settings may be empty, of those that are given."""
        s = self.settings
        pairs = re.findall(r"(--\S+) \{(\w+)\}", OPTIONAL_FLAGS)
        return [item for flag, name in pairs if s[name] for item in (flag, s[name])]

    def _load_flags(self, folder: str) -> list[str]:
        """Flags that continue from the run's last checkpoint, if there is one."""
        return ["--load", folder] if Path(folder, self.latest).is_file() else []

    def _check_checkout(self, variable: str, advice: str) -> None:
        """Raise ConfigError if a checkout has no ``pretrain_gpt.py``."""
        if not Path(self.checkout, "pretrain_gpt.py").is_file():
            raise ConfigError(
                f"{variable}={self.checkout} has no pretrain_gpt.py: give the folder of a "
                f"checkout{advice}"
            )

    def _check_gpt2_files(self) -> None:
        """Raise ConfigError if GPT-2's tokenizer is to run and its two files do not exist."""
        s = self.settings
        files = (s["vocab_path"], s["merge_path"])
        is_gpt2 = s["tokenizer_type"] == "GPT2BPETokenizer" and not self.is_dry_run
        if is_gpt2 and not all(file and Path(file).is_file() for file in files):
            raise ConfigError(
                "set VOCAB_PATH and MERGE_PATH to the two files of GPT-2's tokenizer, or "
                "TOKENIZER_TYPE=NullTokenizer and VOCAB_SIZE"
            )


class Trainer(Program):
    """The trainer of this folder, ``pretrain_gpt_usp.py``."""

    title = "the trainer"

    def _default_data(self) -> list[str]:
        if not (self.is_on_cpu or self.is_dry_run):
            raise DataError("set DATA_PATH to a UTF-8 text file, or to data that Megatron encoded")
        return []

    def command(self) -> list[str]:
        return [str(HERE / "pretrain_gpt_usp.py")]

    def flags(self, data: Sequence[str], paths: Mapping[str, str]) -> list[str]:
        s = self.settings
        flags = _deepspeed_flags(self, data, paths["checkpoint"])
        flags += ["--rotary-base", s["rope_theta"], "--device", s["device"]]
        flags += ["--output-dir", paths["output"]]
        return flags + (["--usp-recompute", "full"] if _recomputes(s) else [])

    def needs_one_queue(self) -> bool:
        # megatron-core's tensor-parallel all-reduce then starts before the GEMM that hides it, but
        # copies overlapped with attention wait behind kernels.
        return int(self.settings["mp_size"]) > 1

    def check_flags(self, flags: Sequence[str], ranks: int) -> int:
        return check_trainer([*flags, "--check-only", "--num-processes", str(ranks)])


class MegatronDeepSpeed(Program):
    """``pretrain_gpt.py`` of a checkout of Megatron-DeepSpeed, under the patches.

    Under DeepSpeed it has no all-reduce that needs one hardware queue; its --sequence-parallel
    requires the variable.
    """

    title = "Megatron-DeepSpeed"
    suffix = "_mds"

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__(settings)
        self.checkout = settings["megatron_deepspeed_path"]

    def check(self) -> None:
        self._check_gpt2_files()
        self._check_checkout(
            "MEGATRON_DEEPSPEED_PATH", ", or unset it to use the trainer of this folder"
        )
        if not self.is_dry_run:
            check_packages(Namespace(**self.settings))

    def _default_data(self) -> list[str]:
        if not self.is_dry_run:
            raise DataError("Megatron-DeepSpeed reads encoded data: set DATA_PATH")
        self.is_encoded = True
        return ["my_text_document"]  # shows its position in a dry run

    def flags(self, data: Sequence[str], paths: Mapping[str, str]) -> list[str]:
        s = self.settings
        s["config"] = paths["config"]
        flags = _deepspeed_flags(self, data, paths["checkpoint"])
        return flags + self._filled(
            MEGATRON_FLAGS,
            TOKENIZER_FLAGS if s["tokenizer_type"] == "GPT2BPETokenizer" else "",
            f"{TENSORBOARD_FLAGS} --log-batch-size-to-tensorboard" if s["tensorboard_dir"] else "",
            "--no-pipeline-parallel" if s["pp_size"] == "1" else "",
            CPU_FLAGS if self.is_on_cpu else "",
            RECOMPUTE_FLAGS if _recomputes(s) else "",
        )

    def config(self) -> str:
        text = (HERE / "ds_config_gpt_TEMPLATE.json").read_text()
        derived = {
            "bf16": self.settings["precision"] == "bf16",
            "overlap_comm": self.settings["pp_size"] == "1",  # DeepSpeed's pipeline cannot
        }
        texts = {name: str(value).lower() for name, value in derived.items()}
        for name, value in {**self.settings, **texts}.items():
            text = text.replace(f"@{name.upper()}@", value)
        return text


class MegatronLM(Program):
    """``pretrain_gpt.py`` of a checkout of Megatron-LM, under the patches."""

    title = "Megatron-LM"
    suffix = "_mlm"
    launchers = ("torchrun", "srun")
    latest = "latest_checkpointed_iteration.txt"

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__(settings)
        self.checkout = settings["megatron_lm_path"]

    def check(self) -> None:
        s = self.settings
        clone = "git clone https://github.com/NVIDIA/Megatron-LM, git checkout core_v0.16.1"
        if not self.checkout:
            raise ConfigError(f"set MEGATRON_LM_PATH to a checkout of Megatron-LM: {clone}")
        self._check_checkout("MEGATRON_LM_PATH", f" of Megatron-LM: {clone}")
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
        """Raise ConfigError if the setting that the tokenizer reads is not given."""
        s = self.settings
        kind = "NullTokenizer" if s["data_path"] == MOCK_DATA else s["tokenizer_type"]
        if kind == "GPT2BPETokenizer":
            self._check_gpt2_files()
        elif kind == "NullTokenizer" and not s["vocab_size"]:
            raise ConfigError("TOKENIZER_TYPE=NullTokenizer and mock data need VOCAB_SIZE")
        elif kind != "NullTokenizer" and not (s["tokenizer_model"] or self.is_dry_run):
            raise ConfigError(
                f"TOKENIZER_TYPE={kind} needs TOKENIZER_MODEL, the tokenizer's folder or file; or "
                "set TOKENIZER_TYPE=NullTokenizer and VOCAB_SIZE"
            )

    def data(self) -> list[str]:
        return [] if self.settings["data_path"] == MOCK_DATA else super().data()

    def _default_data(self) -> list[str]:
        if not self.is_dry_run:
            raise DataError(
                f"Megatron-LM reads encoded data: set DATA_PATH, or DATA_PATH={MOCK_DATA} for its "
                "mock data"
            )
        return ["my_text_document"]

    def flags(self, data: Sequence[str], paths: Mapping[str, str]) -> list[str]:
        s = self.settings
        is_local = s["transformer_impl"] == "local"
        groups = s["num_kv_heads"] != s["num_attn_heads"]
        is_rotary = s["rotary"] == "true"
        flags = self._filled(
            MEGATRON_LM_FLAGS,
            "--group-query-attention --num-query-groups {num_kv_heads}" if groups else "",
            "--position-embedding-type rope --rotary-base {rope_theta}" if is_rotary else "",
            "--sequence-parallel" if int(s["mp_size"]) > 1 else "",
            "--use-distributed-optimizer --overlap-param-gather" if s["zero_stage"] == "1" else "",
            "--bf16" if s["precision"] == "bf16" else "",
            MEGATRON_LM_LOCAL_FLAGS if is_local else "",
            "" if find_spec("fused_weight_gradient_mlp_cuda") else NO_GRADIENT_FUSION,
            MEGATRON_LM_CPU_FLAGS if self.is_on_cpu else "",
            MEGATRON_LM_RECOMPUTE_FLAGS if _recomputes(s) else "",
            TENSORBOARD_FLAGS if s["tensorboard_dir"] else "",
            "--usp-cluster {usp_cluster}" if s["usp_cluster"] else "",
        )
        flags += ["--save", paths["checkpoint"], *self._load_flags(paths["checkpoint"])]
        flags += self._optional_flags()
        return flags + (["--data-path", *data] if data else ["--mock-data"]) + self._tokenizer()

    def _tokenizer(self) -> list[str]:
        s = self.settings
        if s["data_path"] == MOCK_DATA or s["tokenizer_type"] == "NullTokenizer":
            return ["--tokenizer-type", "NullTokenizer", "--vocab-size", s["vocab_size"]]
        flags = ["--tokenizer-type", s["tokenizer_type"]]
        if s["tokenizer_type"] == "GPT2BPETokenizer":
            return [*flags, *self._filled(TOKENIZER_FLAGS)]
        return [*flags, "--tokenizer-model", s["tokenizer_model"] or "my_tokenizer"]

    def needs_one_queue(self) -> bool:
        # Megatron-LM refuses tensor parallelism without, on Hopper and before.
        return int(self.settings["mp_size"]) > 1


def _recomputes(settings: Mapping[str, str]) -> bool:
    """Whether backward recomputes the layers."""
    return settings["activation_checkpoint"] == "true"


def _deepspeed_flags(program: Program, data: Sequence[str], checkpoint: str) -> list[str]:
    """The flags that have the same names in the trainer and in Megatron-DeepSpeed."""
    s = program.settings
    flags = [template.format(**s) for template in FLAGS.split()] + ["--save", checkpoint]
    flags += ["--usp-cluster", s["usp_cluster"]] if s["usp_cluster"] else []
    flags += ["--use-rotary-position-embeddings"] if s["rotary"] == "true" else []
    flags += ["--bf16"] if s["precision"] == "bf16" else []
    flags += program._load_flags(checkpoint)
    flags += ["--data-path", *data] if data else []
    flags += program._optional_flags()
    if program.is_encoded and s["vocab_size"]:  # of encoded data; text has its own
        flags += ["--vocab-size", s["vocab_size"]]
    return flags
