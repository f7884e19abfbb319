"""Tiny runs of Megatron-LM, on gloo ranks that are forked from one server."""

from pathlib import Path
from typing import ClassVar

from lm_rank import Request
from programs import FrameworkServer

HERE = Path(__file__).resolve().parent

TINY = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 4
    --lr 0.1 --min-lr 0.1 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
    --seed 1234 --log-interval 1 --eval-interval 1000 --eval-iters 1 --split 90,5,5 --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 256 --weight-decay 0 --clip-grad 0
    --transformer-impl local --distributed-backend gloo --disable-jit-fuser
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-gradient-accumulation-fusion --no-rope-fusion
"""
# Sensitive to the scale of gradients, which Adam and clipping hide.
SGD = "--optimizer sgd --sgd-momentum 0"
# The distributed optimizer takes Adam alone: lr * g / (|g| + 10) is nearly plain gradient descent.
SGD_BY_ADAM = "--optimizer adam --adam-beta1 0 --adam-eps 10 --lr 1 --min-lr 1"


def flags(
    *, u: int = 1, r: int = 1, tp: int = 1, pp: int = 1, virtual: int = 0, more: str = ""
) -> str:
    """Flags for parallel degrees; ``virtual``: layers of a virtual pipeline stage, 0: none."""
    degrees = (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--make-vocab-size-divisible-by {128 // tp}"
    )
    if u * r > 1:
        degrees += f" --context-parallel-size {u * r} --ulysses-degree {u}"
    if virtual:
        degrees += f" --num-layers-per-virtual-pipeline-stage {virtual}"
    return f"{degrees} {more}"


class TrainingServer(FrameworkServer):
    SERVER = HERE / "lm_server.py"
    REQUEST = Request
    ENVIRONMENT: ClassVar = {"TORCHDYNAMO_DISABLE": "1"}  # nothing is compiled

    def arguments(self, text: str, folder: Path) -> tuple[str, ...]:
        """The script's arguments: a tiny model, plain gradient descent, and ``text``."""
        data = f"--data-path {self.folder / 'text'} --data-cache-path {self.folder / 'cache'}"
        optimizer = "" if "--optimizer" in text else SGD
        return tuple(f"{TINY} {optimizer} {data} {text}".split())
