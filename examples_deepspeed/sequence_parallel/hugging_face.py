#!/usr/bin/env python3
"""A checkpoint of the trainer as a model of transformers, and back: the weights, bit for bit.

    python hugging_face.py export CHECKPOINT_FOLDER MODEL_FOLDER
    python hugging_face.py import MODEL_FOLDER CHECKPOINT_FOLDER --like CHECKPOINT_FOLDER

RMSNorm, SwiGLU and rotary embeddings make a ``LlamaForCausalLM``; LayerNorm, GELU, biases and
learned positions a ``GPT2LMHeadModel``. What is imported starts at step 0, without states of the
optimizer. A sliding window is not in a checkpoint: set it in what uses the exported model.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from usp_trainer.checkpoint import FORMAT, MODEL, _metadata_checksum, _read_file
from usp_trainer.run_files import LATEST, METADATA, checkpoint_to_load, latest_checkpoint

from ds_usp import CheckpointError, ConfigError, one_line_errors

FILE = "mp_rank_00_model_states.pt"  # of a single tensor-parallel rank, its weights whole
Weights = dict[str, Tensor]
Facts = Mapping[str, Any]  # of the model, as a checkpoint's metadata has them


def config_of(facts: Facts) -> Any:
    """The configuration of the transformers model with these facts.

    Raises:
        ConfigError: no layout of the two is this model's; it names what differs.
    """
    import transformers

    named = {
        "rmsnorm": facts["normalization"] == "rmsnorm",
        "SwiGLU": bool(facts["swiglu"]),
        "rotary embeddings": bool(facts["use_rotary_position_embeddings"]),
        "no biases": bool(facts["disable_bias_linear"]),
    }
    if facts.get("transformer_impl", "local") != "local":
        raise ConfigError(
            f"weights of --transformer-impl {facts['transformer_impl']} have other names: load the "
            "checkpoint's model with --transformer-impl local, which both can be trained with"
        )
    sizes = {"vocab_size": facts["padded_vocab_size"]}
    tied = {"tie_word_embeddings": not facts["untie_embeddings_and_output_weights"]}
    heads, groups = facts["num_attention_heads"], facts["num_key_value_heads"]
    if all(named.values()):
        return transformers.LlamaConfig(
            **sizes,
            **tied,
            hidden_size=facts["hidden_size"],
            intermediate_size=facts["ffn_hidden_size"],
            num_hidden_layers=facts["num_layers"],
            num_attention_heads=heads,
            num_key_value_heads=groups,
            max_position_embeddings=facts["max_position_embeddings"],
            rms_norm_eps=facts["layernorm_epsilon"],
            rope_parameters={"rope_type": "default", "rope_theta": float(facts["rotary_base"])},
        )
    if any(named.values()) or heads != groups:
        has = ", ".join(name for name, found in named.items() if found) or "fewer KV heads"
        raise ConfigError(
            f"the model has {has}, and not all of Llama ({', '.join(named)}); a GPT-2 has none of "
            "these and a KV head for each query head: no model of transformers is exported for it"
        )
    return transformers.GPT2Config(
        **sizes,
        **tied,
        n_embd=facts["hidden_size"],
        n_inner=facts["ffn_hidden_size"],
        n_layer=facts["num_layers"],
        n_head=heads,
        n_positions=facts["max_position_embeddings"],
        layer_norm_epsilon=facts["layernorm_epsilon"],
        activation_function="gelu",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )


def names_of(facts: Facts) -> dict[str, tuple[str, ...]]:
    """The trainer's name of each weight -> transformers' names of its parts, in their order. Of
    queries, keys and values, and of gates and values, Llama has a matrix each."""
    layers, llama = facts["num_layers"], facts["normalization"] == "rmsnorm"
    begin = "model." if llama else "transformer."
    kinds = ("weight",) if llama else ("weight", "bias")
    names = {
        "layers.0.embedding.word_embeddings.weight": (begin + ("embed_tokens" if llama else "wte"),)
    }
    if not llama:
        names["layers.0.embedding.position_embeddings.weight"] = (begin + "wpe",)
    parts = {
        "input_layernorm": ("input_layernorm",) if llama else ("ln_1",),
        "self_attention.linear_qkv": tuple(f"self_attn.{x}_proj" for x in "qkv")
        if llama
        else ("attn.c_attn",),
        "self_attention.linear_proj": ("self_attn.o_proj",) if llama else ("attn.c_proj",),
        "pre_mlp_layernorm": ("post_attention_layernorm",) if llama else ("ln_2",),
        "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj") if llama else ("mlp.c_fc",),
        "mlp.linear_fc2": ("mlp.down_proj",) if llama else ("mlp.c_proj",),
    }
    whole = {name: (f"{of[0]}.weight",) for name, of in names.items()}
    for layer in range(layers):
        place = f"{begin}{'layers' if llama else 'h'}.{layer}."
        for part, others in parts.items():
            for kind in kinds:
                name = f"layers.{layer + 1}.layer.{part}.{kind}"
                whole[name] = tuple(f"{place}{other}.{kind}" for other in others)
    for kind in kinds:
        last = begin + ("norm" if llama else "ln_f")
        whole[f"layers.{layers + 1}.norm.{kind}"] = (f"{last}.{kind}",)
    if facts["untie_embeddings_and_output_weights"]:
        whole[f"layers.{layers + 2}.output.weight"] = ("lm_head.weight",)
    return whole


def is_transposed(name: str, facts: Facts) -> bool:
    """Whether transformers holds the matrix as [in, out], as GPT-2's ``Conv1D`` does."""
    return facts["normalization"] != "rmsnorm" and ".linear_" in name and name.endswith("weight")


def exported(weights: Mapping[str, Tensor], facts: Facts) -> Weights:
    """The trainer's weights under transformers' names. Megatron's rows of queries, keys and values
    are [KV head, its query heads and k and v, head dim]."""
    result: Weights = {}
    groups, heads = facts["num_key_value_heads"], facts["num_attention_heads"]
    for name, others in names_of(facts).items():
        parts: tuple[Tensor, ...] = (weights[name],)
        if ".linear_qkv." in name:
            rows = weights[name].unflatten(0, (groups, heads // groups + 2, -1))
            parts = (
                rows[:, :-2].flatten(0, 2),
                rows[:, -2].flatten(0, 1),
                rows[:, -1].flatten(0, 1),
            )
            parts = parts if len(others) == 3 else (torch.cat(parts),)
        elif len(others) == 2:
            parts = weights[name].chunk(2)
        for other, part in zip(others, parts, strict=True):
            result[other] = (part.T if is_transposed(name, facts) else part).contiguous()
    return result


def imported(weights: Mapping[str, Tensor], facts: Facts) -> Weights:
    """The inverse of :func:`exported`."""
    result: Weights = {}
    groups, heads = facts["num_key_value_heads"], facts["num_attention_heads"]
    for name, others in names_of(facts).items():
        parts = [weights[other] for other in others]
        parts = [part.T for part in parts] if is_transposed(name, facts) else parts
        if ".linear_qkv." in name:
            q, k, v = parts if len(parts) == 3 else parts[0].chunk(3)
            q = q.unflatten(0, (groups, heads // groups, -1))
            k, v = (x.unflatten(0, (groups, 1, -1)) for x in (k, v))
            parts = [torch.cat([q, k, v], 1).flatten(0, 2)]
        result[name] = torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].contiguous()
    return result


def export(checkpoint: Path, folder: Path) -> None:
    """Write the latest checkpoint's model as ``save_pretrained`` does.

    Raises:
        CheckpointError: weights that are not in one file, or not those of the metadata.
        ConfigError: a model that neither layout is.
    """
    import transformers

    tag, metadata = checkpoint_to_load(checkpoint)
    cut, facts = metadata["cut"], metadata["model"]
    config = config_of(facts)
    sizes = cut["tensor_model_parallel_size"], cut["pipeline_model_parallel_size"]
    if max(sizes) > 1 or cut["zero_stage"] == 3:
        raise CheckpointError(
            f"{checkpoint / tag} was saved with tensor parallel {sizes[0]}, pipeline {sizes[1]}, "
            f"ZeRO-{cut['zero_stage']}: its weights are in several files. Load it with tensor "
            "parallel 1 and ZeRO-1, without a pipeline, save a step, and export that"
        )
    module = _read_file(checkpoint / tag / FILE, "cpu")["module"]
    state = exported(module, facts)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if not facts["untie_embeddings_and_output_weights"]:
        embedding = "model.embed_tokens" if "model.norm.weight" in state else "transformer.wte"
        state["lm_head.weight"] = state[f"{embedding}.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = state["lm_head.weight"].dtype
    model.save_pretrained(folder)


def import_(folder: Path, checkpoint: Path, like: Path) -> None:
    """Write a model of transformers as a checkpoint of step 0 that ``--load`` takes.

    Args:
        like: a checkpoint of the same model, for what a run's flags must repeat.

    Raises:
        CheckpointError: a model of another shape, or a folder that holds a checkpoint.
    """
    import transformers

    if latest_checkpoint(checkpoint) is not None:
        raise CheckpointError(f"{checkpoint} holds a checkpoint: name another folder")
    _, metadata = checkpoint_to_load(like)
    facts = {name: metadata["model"].get(name) for name in MODEL}
    wanted = config_of(facts | {"transformer_impl": "local"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    found, expected = model.config.to_dict(), wanted.to_dict()
    skipped = ("architectures", "dtype", "transformers_version", "_name_or_path", "use_cache")
    differs = {
        name: (found.get(name), value)
        for name, value in expected.items()
        if name not in skipped and not name.endswith("_token_id") and found.get(name) != value
    }
    if differs:
        name, (this, value) = next(iter(differs.items()))
        raise CheckpointError(f"{folder} is another model than {like}: {name} {this}, not {value}")
    written = checkpoint / "step_0"
    written.mkdir(parents=True)
    module = imported(model.state_dict(), facts)
    torch.save({"module": module, "optimizer": {"state": {}}}, written / FILE)
    content = (written / FILE).read_bytes()
    metadata = {
        "format": FORMAT,
        "progress": {"step": 0, "samples": 0},
        "model": metadata["model"],
        # Of no number of ranks: each run takes its shards by the names of parameters.
        "cut": metadata["cut"] | {"zero_stage": 0, "sequence_x_data_ranks": 0},
        "data": metadata["data"],
        "files": {FILE: len(content)},
        "sha256": {FILE: hashlib.sha256(content).hexdigest()},
    }
    metadata |= {"checksum": _metadata_checksum(metadata)}
    (written / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    (checkpoint / LATEST).write_text("step_0\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("export", help="a checkpoint as a model of transformers")
    one.add_argument("checkpoint", type=Path, help="the folder of --save")
    one.add_argument("folder", type=Path)
    other = commands.add_parser("import", help="a model of transformers as a checkpoint")
    other.add_argument("folder", type=Path)
    other.add_argument("checkpoint", type=Path, help="a new folder for --load")
    other.add_argument("--like", type=Path, required=True, help="a checkpoint of the same model")
    args = parser.parse_args(argv)
    if args.command == "export":
        export(args.checkpoint, args.folder)
    else:
        import_(args.folder, args.checkpoint, args.like)
    return 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
