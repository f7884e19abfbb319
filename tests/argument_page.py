"""docs/reference/megatron-arguments.md, compared with the arguments that there are.

It says of each family whether it composes with Ulysses x ring, is refused or untouched. A newer
Megatron-LM may bring an argument of attention that no patch knows: its name is how it is noticed.
"""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/megatron-arguments.md"
# Words in names of what decides how tokens of a sequence meet, or when attention runs.
MEETS = re.compile(
    r"attn|attention|seq|context|rope|rotary|position|softmax|mask|window|logit|cuda_?graph|recompute"
    r"|checkpoint_act|offload|mla|latent|mamba|hybrid_|kitchen|packing|sft|determin|batch_inv|mtp"
    r"|per_token|yarn|beta_|sparse|memory_eff|(^|_)(cp|qk?v?|kv|head|heads|dsa|spec)(_|$)|linear_(conv|key|value|num)"
)
# Groups of --help of which no argument reaches a GPT's layers, whatever its name.
APART = {
    *("rl", "inference", "vision", "biencoder"),
    *("profiling", "tokenizer", "checkpointing", "one logger"),
}


def plain(name: str) -> str:
    """A flag or field without its dashes and what says on or off: they differ between the two."""
    return re.sub(r"^(no|disable|use|apply)_", "", name.lstrip("-").replace("-", "_"))


def named(column: int | None = None) -> set[str]:
    """Names on the page, :func:`plain`; of one column of its table: 2 is what is refused."""
    text = PAGE.read_text(encoding="utf-8")
    if column is not None:
        rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
        text = "\n".join(row[1 + column] for row in rows)
    return {plain(name) for name in re.findall(r"`(-*[a-z][\w-]+)", text)}


def unnamed(names: Iterable[str]) -> list[str]:
    """Those that speak of attention or a sequence and that the page does not have."""
    known = named()
    public = (name for name in names if not name.startswith("_"))
    return sorted(x for x in public if MEETS.search(plain(x)) and plain(x) not in known)
