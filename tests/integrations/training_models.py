"""Tiny models to train, and what their steps are compared by."""

from typing import Any

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

VOCAB, HIDDEN, LAYERS = 97, 64, 3
Model = Any
Batch = dict[str, torch.Tensor]


def llama(**changes: Any) -> Model:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "attn_implementation": "eager",
    }
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).train()


def gemma() -> Model:
    """Caps its logits by tanh, and embeds with the head's weight."""
    return _tiny(Gemma2ForCausalLM, Gemma2Config, head_dim=8, final_logit_softcapping=5.0)


def cohere() -> Model:
    """Multiplies its logits."""
    return _tiny(CohereForCausalLM, CohereConfig, logit_scale=0.3)


def granite(**changes: Any) -> Model:
    """Divides its logits."""
    return _tiny(GraniteForCausalLM, GraniteConfig, logits_scaling=3.0, **changes)


def gpt2() -> Model:
    """Whose linear layers take views of their input."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _tiny(GPT2LMHeadModel, GPT2Config, **rates)


def modernbert() -> Model:
    """Not causal, and a head with a bias."""
    return _tiny(ModernBertForMaskedLM, ModernBertConfig, reference_compile=False)


def _tiny(model_class: Any, config_class: Any, **changes: Any) -> Model:
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        **changes,
    )
    torch.manual_seed(7)
    return model_class(config).train()


def batch_of(tokens: int, seed: int = 0) -> Batch:
    ids = torch.randint(VOCAB, (2, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def forward(model: Model, batch: Batch) -> torch.Tensor:
    torch.manual_seed(11)
    loss: torch.Tensor = model(**batch).loss
    return loss


def gradients(model: Model) -> dict[str, torch.Tensor]:
    out = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out


def difference(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of two models' gradients."""
    assert x.keys() == y.keys() and x
    return max(float((x[n] - y[n]).norm() / y[n].norm()) for n in x)


ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"target_modules": "all-linear"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def adapted(model: Model, adapter: str) -> Model:
    """A model with LoRA by PEFT."""
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTERS[adapter]
    )
    return peft.get_peft_model(model, config).train()
