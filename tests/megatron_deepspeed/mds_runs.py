"""Tiny runs of Megatron-DeepSpeed, on gloo ranks that are forked from one server."""

import json
from pathlib import Path
from typing import Any, ClassVar

from mds_rank import Request
from programs import FrameworkServer, losses_of, relative_difference

__all__ = ["TrainingServer", "flags", "losses_of", "relative_difference"]

HERE = Path(__file__).resolve().parent

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --min-lr 1e-4 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
    --seed 1234 --log-interval 1 --eval-interval 1000 --eval-iters 1 --data-impl mmap
    --split 90,5,5 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 256
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-gradient-accumulation-fusion --distributed-backend gloo --deepspeed
"""
# Sensitive to the scale of gradients, which Adam and clipping hide.
SGD = "--optimizer sgd --sgd-momentum 0 --lr 0.1 --weight-decay 0 --clip-grad 0"


def flags(
    *,
    sp: int = 1,
    u: int | str | None = None,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    more: str = "",
    config: dict[str, Any] | None = None,
    pipe: bool | None = None,
) -> str:
    """Flags for parallel degrees; ``pipe``: DeepSpeed's pipeline engine, by default if pp > 1."""
    use_pipe = pp > 1 if pipe is None else pipe
    degrees = (
        f"--ds-sequence-parallel-size {sp} --tensor-model-parallel-size {tp} "
        f"--pipeline-model-parallel-size {pp} --zero-stage {zero} "
        f"--make-vocab-size-divisible-by {128 // tp} --config {zero}"
    )
    if u is not None:
        degrees += f" --ulysses-degree {u}"
    if not use_pipe:
        degrees += " --no-pipeline-parallel"
    text = json.dumps(config or {}).replace(" ", "")
    return f"{degrees} --json {text} {more}"


class TrainingServer(FrameworkServer):
    SERVER = HERE / "mds_server.py"
    REQUEST = Request
    ENVIRONMENT: ClassVar = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron wants it under tensor parallelism
        "DS_ACCELERATOR": "cpu",
    }

    def arguments(self, text: str, folder: Path) -> tuple[str, ...]:
        """The script's arguments; ``--config ZERO`` and ``--json TEXT`` become DeepSpeed's file."""
        arguments = text.split()
        settings = {}
        for name in ("--config", "--json"):
            index = arguments.index(name)
            settings[name] = arguments[index + 1]
            del arguments[index : index + 2]
        arguments = [*TINY.split(), *arguments]
        if "--optimizer" not in arguments:
            arguments = [*SGD.split(), *arguments]

        def last(flag: str) -> str:
            return arguments[len(arguments) - 1 - arguments[::-1].index(flag) + 1]

        config = {
            "train_batch_size": int(last("--global-batch-size")),
            "train_micro_batch_size_per_gpu": int(last("--micro-batch-size")),
            "steps_per_print": 1000,
            "gradient_clipping": float(last("--clip-grad")),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(settings["--config"])},
            "bf16": {"enabled": "--bf16" in arguments},
            **json.loads(settings["--json"]),
        }
        path = folder / "deepspeed.json"
        path.write_text(json.dumps(config))
        arguments += ["--deepspeed_config", str(path), "--data-path", str(self.folder / "text")]
        return tuple(arguments)
