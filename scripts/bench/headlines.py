"""What README's table of benchmarks compares, and how it calls the methods."""

from __future__ import annotations

UNSHARDED = "stock"  # every sequence whole, on one rank
SHORT_NAMES = {
    "DeepSpeed ulysses": "DeepSpeed",
    "plain all-to-all": "plain all-to-alls",
    "TE p2p": "TransformerEngine `p2p`",
    "TE a2a": "TransformerEngine `a2a`",
    "diffusers ulysses 2": "diffusers' Ulysses",
    "diffusers ring 2": "diffusers' ring",
    **{f"TransformerEngine {kind}": f"TransformerEngine `{kind}`" for kind in ("p2p", "a2a")},
}
TE_LAYERS = "TransformerEngine's layers"
HEADLINES = (
    ("8K, 32/8 heads, FlashAttention-4, 2 GPUs", "attention_short.csv", "8K 32/8 d128", "flash4"),
    ("32K, 32/32, FlashAttention-4, 4 GPUs", "attention.csv", "32K 32/32 d128", "flash4"),
    ("128K, 32/32, FlashAttention-4, 4 GPUs", "attention.csv", "128K 32/32 d128", "flash4"),
    ("128K, 32/32, cuDNN, 4 GPUs", "attention.csv", "128K 32/32 d128", "cudnn"),
    *(
        (
            f"GPT 1.3B step, {tokens}, batch {batch}, cuDNN, 2 GPUs",
            "megatron_lm.csv",
            f"gpt-1.3b 24 layers {tokens} x {batch}",
            TE_LAYERS,
        )
        for tokens, batch in (("16K", 2), ("32K", 1))
    ),
    ("Llama 3 step, 8 layers, 32K, 2 GPUs", "transformers_32k.jsonl", "plain:32768", "FSDP2"),
    ("Wan 2.1 pass, 10 blocks, 480p, 2 GPUs", "diffusers.jsonl", "wan-480p:forward", "cudnn"),
    ("Flux.1 pass, 1024 px, 2 H100", "diffusers_h100.jsonl", "flux-1024:forward", "cudnn"),
)
