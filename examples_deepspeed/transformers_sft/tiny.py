"""What the tiny script needs: a model without a download, and a comparison of two runs."""

import json
from pathlib import Path

import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LIMIT = 1e-5  # relative difference of losses and gradient norms in fp32


def tiny_model() -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerFast]:
    """A random Llama, and a tokenizer whose tokens are bytes."""
    vocabulary = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = Tokenizer(models.BPE({x: i for i, x in enumerate(vocabulary)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    end = {"eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=tokens, **end)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, **ids)), tokenizer


def losses_match(history: list[dict], folder: str) -> bool:
    """Whether losses and gradient norms are those of another run; prints the largest difference."""
    other = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    steps = [(a, b) for a, b in zip(history, other, strict=True) if "grad_norm" in a]
    pairs = [(a[key], b[key]) for a, b in steps for key in ("loss", "grad_norm")]
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    verdict = "agree" if worst < LIMIT else "DO NOT AGREE"
    print(f"{len(pairs)} losses and gradient norms {verdict} with those of {folder}:")
    print(f"largest relative difference {worst:.1e} (limit {LIMIT:.0e})", flush=True)
    return worst < LIMIT
