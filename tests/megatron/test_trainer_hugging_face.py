"""A trainer's checkpoint as a model of transformers: equal logits, and back to the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankContext, fork_world
from trainer_runs import start

from ds_usp import ConfigError

GPT2 = (
    " --normalization layernorm --no-swiglu --no-disable-bias-linear --num-key-value-heads 4"
    " --no-use-rotary-position-embeddings --no-untie-embeddings-and-output-weights"
)
TOKENS = torch.randint(250, (2, 64), generator=torch.Generator().manual_seed(0))
ADAM = " --optimizer adam --lr 1e-3"


def there_and_back(ctx: RankContext, *, flags: str, folder: str) -> dict[str, Any]:
    """Of one rank: logits of both, weights before and after, the loss of the next step of both."""
    import hugging_face

    save, model, again = (Path(folder) / name for name in ("save", "model", "again"))
    run = start(f"{flags} --save {save}", folder)
    run.step()
    run.save()
    module = run.trainer.engine.module
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.no_grad():
        embedding, *layers, norm, output = module.calls
        hidden = embedding(TOKENS)
        for layer in layers:
            hidden = layer(hidden)
        logits = output(norm(hidden)).transpose(0, 1)
    hugging_face.main(["export", str(save), str(model)])
    hugging_face.main(["import", str(model), str(again), "--like", str(save)])
    back = start(f"{flags} --load {again}", folder)
    read = {name: p.detach() for name, p in back.trainer.engine.module.named_parameters()}
    return {
        "logits": logits,
        "equal": {name: torch.equal(read[name], weight) for name, weight in weights.items()},
        "step": back.progress.step,
        "loss": back.step()["loss"],
    }


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("flags", "kind"),
    [(ADAM + " --zero-stage 1", "LlamaForCausalLM"), (GPT2 + ADAM, "GPT2LMHeadModel")],
)
def test_a_checkpoint_goes_to_transformers_and_back(flags, kind, tmp_path):
    (found,) = fork_world(there_and_back, 1, flags=flags, folder=str(tmp_path))
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == kind
    with torch.no_grad():
        logits = model(TOKENS).logits
    assert (logits - found["logits"]).abs().max() < 1e-5 * logits.abs().max()
    # Positions are in them: with the rows of queries in another order the logits are others.
    query = next(p for name, p in model.named_parameters() if "q_proj" in name or "c_attn" in name)
    query.data = query.data.flip(0 if kind.startswith("Llama") else 1)
    with torch.no_grad():
        changed = model(TOKENS).logits
    assert (changed - logits).abs().max() > 1e-4 * logits.abs().max()
    assert all(found["equal"].values()), found["equal"]
    assert found["step"] == 0 and found["loss"] > 0


def test_a_model_of_neither_layout_is_refused():
    import hugging_face

    facts = {"normalization": "rmsnorm", "swiglu": False, "use_rotary_position_embeddings": True}
    facts |= {"disable_bias_linear": True, "padded_vocab_size": 96, "num_attention_heads": 4}
    facts |= {"num_key_value_heads": 4, "untie_embeddings_and_output_weights": True}
    with pytest.raises(
        ConfigError, match="the model has rmsnorm, rotary embeddings, no biases, an"
    ):
        hugging_face.config_of(facts)
