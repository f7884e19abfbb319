"""Model shapes: built in, from files, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planner_facts import rows

from ds_usp.errors import ConfigError
from ds_usp.planner.models import MODELS, ModelShape, load_model

# Parameters as their makers count them.
PARAMETERS = {
    "llama-7b": 6.74e9,
    "llama-65b": 65.3e9,
    "llama-70b": 69.0e9,
    "llama-175b": 174e9,
    "llama3-8b": 8.03e9,
    "gpt-1.3b": 1.31e9,
    "gpt-6.7b": 6.65e9,
    "gpt-30b": 29.3e9,
}


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_have_their_size(name: str) -> None:
    assert load_model(name).parameters() == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("given", ["65B", "models.json:65B", "Llama-65B", "LLAMA-65b"])
def test_names(given: str) -> None:
    assert load_model(given) is MODELS["llama-65b"]


@pytest.mark.parametrize("row", rows("models.csv"), ids=lambda row: row["model"])
def test_shapes_behind_the_published_tables(row: dict[str, str]) -> None:
    shape = load_model(row.pop("model"))
    for field, value in row.items():
        assert getattr(shape, field) == int(value), field


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


ENTRY = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 100}


@pytest.mark.parametrize(
    "content",
    [
        {"mine": ENTRY},
        {"models": {"mine": ENTRY, "other": {}}},
        [{"name": "mine", **ENTRY}],
        {"models": [{"name": "mine", **ENTRY}, {"name": "other"}]},
    ],
)
def test_a_file_of_models(tmp_path: Path, content: object) -> None:
    file = write(tmp_path / "models.json", content)
    assert load_model(f"{file}:mine") == ModelShape("mine", 2, 64, 128, 4, 2, 100)
    with pytest.raises(ConfigError, match="has no model 'yours'; it has mine"):
        load_model(f"{file}:yours")


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rope_scaling": {"factor": 8.0},
}


def test_a_huggingface_config(tmp_path: Path) -> None:
    file = write(tmp_path / "config.json", LLAMA)
    assert load_model(file).parameters() == MODELS["llama3-8b"].parameters()
    assert load_model(str(tmp_path)) == load_model(file)
    wide = write(tmp_path / "wide.json", {**LLAMA, "head_dim": 256})
    assert load_model(wide).q_width == 32 * 256


def test_gpt2s_config(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}
    shape = load_model(write(tmp_path / "config.json", gpt2))
    assert not shape.gated and shape.tied and shape.ffn == 6400
    assert shape.parameters(1024) == pytest.approx(1.558e9, rel=0.001)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({**LLAMA, "num_local_experts": 8}, "only dense models"),
        ({**LLAMA, "num_key_value_heads": 5}, "heads must be a multiple of kv_heads"),
        ({**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 8}, "give head_dim"),
        ({**LLAMA, "num_hidden_layers": 0}, "layers"),
        ({**LLAMA, "num_hidden_layers": 2.5}, "whole number"),
        ({"hidden_size": 64}, "has no layers, ffn, heads, vocab"),
        ([1, 2], "must be an object"),
    ],
)
def test_impossible_models(tmp_path: Path, content: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_model(write(tmp_path / "config.json", content))


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for given, says in (
        (str(tmp_path / "none.json"), "cannot read"),
        (str(tmp_path / "broken.json"), "is not JSON"),
        ("llama4-1t", "no model 'llama4-1t'; there are llama-7b"),
        (write(tmp_path / "config.json", LLAMA) + ":mine", "describes one model"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_model(given)
