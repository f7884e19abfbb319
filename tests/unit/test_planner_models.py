"""Model shapes: built in, from files, and refused."""

import json
from pathlib import Path

import pytest
from planner_expectations import rows

from ds_usp.errors import ConfigError
from ds_usp.planner.formulas import attention_flop_per_token
from ds_usp.planner.models import MODELS, ModelShape, layer_matrices, load_model
from ds_usp.planner.parallel_config import Workload

# Parameters as their makers count them.
PARAMETERS = {
    "llama-7b": 6.74e9,
    "llama-65b": 65.3e9,
    "llama-70b": 69.0e9,
    "llama-175b": 174e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.6e9,
    "qwen2.5-7b": 7.62e9,
    "gpt-1.3b": 1.31e9,
    "gpt-6.7b": 6.65e9,
    "gpt-30b": 29.3e9,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "phi-4": 14_659_507_200,
    # Counted on the meta device: transformers 5.23's models of the published configurations.
    "qwen3-next": 79_674_391_296,
    "qwen3.5-9b": 8_953_803_264,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-3-nano": 31_577_937_344,
    "granite-4-micro": 3_191_396_096,
    "granite-4-small": 32_207_337_984,
    "falcon-h1-7b": 7_585_513_568,
    "falcon-h1-34b": 33_642_221_312,
    "jamba-mini": 51_570_323_328,
    "lfm2-1.2b": 1_170_340_608,
    "minimax-text-01": 456_089_655_296,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "mistral-7b": 7_241_732_096,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-12b": 11_766_034_176,
}
# Of which a token takes part in so many, as their makers say; their embedding is among them.
ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-next": 3e9,
    "nemotron-3-nano": 3.2e9,
    "granite-4-small": 9e9,
    "jamba-mini": 12e9,
}


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_have_their_size(name):
    shape = load_model(name)
    assert shape.parameters() == pytest.approx(
        PARAMETERS[name], rel=0.01 if PARAMETERS[name] % 1e6 == 0 else 2e-6
    )


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_multiplies_by_some_of_the_experts(name):
    shape = load_model(name)
    idle = shape.parameters() - ACTIVE[name]
    active = sum(part.layers * part.matrix_elements for part in shape.parts)
    held = sum(part.layers * sum(layer_matrices(part)) for part in shape.parts)
    assert held - active == pytest.approx(idle, rel=0.02)


@pytest.mark.parametrize("given", ["65B", "Llama-65B", "LLAMA-65b"])
def test_names(given):
    assert load_model(given) is MODELS["llama-65b"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("nvidia/Nemotron-H-8B-Base-8K", "nemotron-h-8b"),
    ],
)
def test_ids_of_the_hub(given, name):
    """A trained-on model has the shape of its base; another version need not."""
    assert load_model(given) is MODELS[name]
    with pytest.raises(ConfigError, match="Any other is planned by its config"):
        load_model(f"{given}-v9")


@pytest.mark.parametrize("row", rows("models.csv"), ids=lambda row: row["model"])
def test_shapes_behind_the_published_tables(row):
    shape = load_model(row.pop("model"))
    for field, value in row.items():
        assert getattr(shape, field) == int(value), field


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


ENTRY = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 100}


def test_a_file_with_fields_of_ours(tmp_path):
    assert load_model(write(tmp_path / "mine.json", ENTRY)) == ModelShape(
        "mine", 2, 64, 128, 4, 2, 100
    )


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


def test_a_huggingface_config(tmp_path):
    file = write(tmp_path / "config.json", LLAMA)
    assert load_model(file).parameters() == MODELS["llama3-8b"].parameters()
    assert load_model(str(tmp_path)) == load_model(file)
    wide = write(tmp_path / "wide.json", {**LLAMA, "head_dim": 256})
    assert load_model(wide).q_width == 32 * 256


def test_facts_that_flags_are_written_from(tmp_path):
    """As the published configurations say them, and as HuggingFace's defaults."""
    for name, theta, epsilon in (
        ("llama3-8b", 500000, 1e-5),
        ("llama3-70b", 500000, 1e-5),
        ("qwen2.5-7b", 1e6, 1e-6),
        ("gpt-1.3b", 10000, 1e-5),
    ):
        shape = load_model(name)
        assert (shape.rope_theta, shape.norm_epsilon) == (theta, epsilon)
        assert shape.qkv_bias == name.startswith("qwen") and not shape.other_facts

    def facts(kind: str, **more: object) -> ModelShape:
        sizes = config(kind, "2 64 128 4 2 100", **more)
        return load_model(write(tmp_path / "config.json", sizes))

    qwen = facts("qwen2", rope_theta=1e6, rms_norm_eps=1e-6, hidden_act="silu")
    assert (qwen.rope_theta, qwen.norm_epsilon, qwen.qkv_bias) == (1e6, 1e-6, True)
    assert qwen.parameters() - facts("llama").parameters() == 2 * (64 + 2 * 32)
    assert facts("qwen3").qk_norm and facts("llama").norm_epsilon == 1e-6
    new = {"rope_type": "default", "rope_theta": 5e5}
    assert facts("llama", rope_parameters=new).rope_theta == 5e5
    assert not facts("llama", rope_parameters=new).other_facts
    for more, named in (
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling"),
        ({"rope_parameters": {**new, "rope_type": "llama3"}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias"),
    ):
        (fact,) = facts("llama", **more).other_facts
        assert fact.startswith(named)
    assert facts("gemma").other_facts == ("layers of model_type gemma",)


def test_a_dense_decoder_of_another_family_and_one_with_towers(tmp_path):
    """Planned as attention and a gated MLP; the fact stays, so that no flags are written of it."""
    other = load_model(
        write(tmp_path / "glm4.json", {**LLAMA, "model_type": "glm4", "hidden_act": "silu"})
    )
    assert other.parameters() == MODELS["llama3-8b"].parameters()
    assert "layers of model_type glm4" in other.other_facts
    seeing = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 8}}
    text = load_model(write(tmp_path / "llava.json", seeing))
    assert text.parameters() == other.parameters()
    assert text.other_facts[-1] == "towers for images or sounds"


@pytest.mark.parametrize(
    ("key", "field"),
    [("kv_hedds", "kv_heads"), ("n_kv_heads", "kv_heads"), ("rope_thetta", "rope_theta")],
)
def test_a_misspelt_field_is_no_default(tmp_path, key, field):
    sizes = {name: value for name, value in ENTRY.items() if name != "kv_heads"}
    path = tmp_path / "model.json"
    with pytest.raises(ConfigError, match=f"{key}', which is no field.* write '{field}'"):
        load_model(write(path, {**sizes, key: 2}))
    load_model(write(path, {**sizes, field: 2, "max_position_embeddings": 8192}))


def test_gpt2s_config(tmp_path):
    gpt2 = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}
    shape = load_model(write(tmp_path / "config.json", gpt2))
    assert not shape.gated and shape.tied and shape.ffn == 6400
    assert shape.parameters(1024) == pytest.approx(1.558e9, rel=0.001)


def config(kind: str, sizes: str, **more: object) -> dict[str, object]:
    """A configuration with the names that most of HuggingFace's have."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size")
    return {"model_type": kind, **dict(zip(names, map(int, sizes.split()), strict=True)), **more}


# Configurations as published, and the parameters that their makers count.
PUBLISHED = [
    (config("mistral", "32 4096 14336 32 8 32000", sliding_window=4096), 7.24e9),
    (config("qwen2", "28 3584 18944 28 4 152064", sliding_window=131072), 7.62e9),
    (config("qwen2", "24 896 4864 14 2 151936", tie_word_embeddings=True), 0.494e9),
    (config("qwen3", "28 1024 3072 16 8 151936", head_dim=128, tie_word_embeddings=True), 0.596e9),
    (config("qwen3", "36 4096 12288 32 8 151936", head_dim=128), 8.19e9),
    (config("gemma", "28 3072 24576 16 16 256000", head_dim=256), 8.54e9),
    (config("gemma", "18 2048 16384 8 1 256000", head_dim=256), 2.51e9),
    (config("phi3", "32 3072 8192 32 32 32064", sliding_window=2047), 3.82e9),
    (config("starcoder2", "30 3072 12288 24 2 49152"), 3.03e9),
    (
        {
            "model_type": "gpt_neox",
            "num_hidden_layers": 44,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 64,
            "vocab_size": 50432,
        },
        20.6e9,
    ),
]


@pytest.mark.parametrize(("content", "parameters"), PUBLISHED)
def test_published_configurations_have_their_size(tmp_path, content, parameters):
    shape = load_model(write(tmp_path / "config.json", content))
    assert shape.parameters() == pytest.approx(parameters, rel=0.005)


def test_windows_of_layers_count_where_they_are_shorter_than_the_sequence(tmp_path):
    windowed = load_model(write(tmp_path / "config.json", PUBLISHED[0][0]))
    assert Workload(windowed, 4096).model.window == 0 and Workload(windowed, 4096).model.is_plain
    assert Workload(windowed, 4097).model.window == 4096
    off = {**PUBLISHED[0][0], "use_sliding_window": False}
    assert load_model(write(tmp_path / "config.json", off)).window == 0
    gemma = load_model("google/gemma-2-9b")
    assert Workload(gemma, 4096).model.is_plain and not Workload(gemma, 4096).model.kinds
    kinds = [(kind.layers, kind.window) for kind in Workload(gemma, 8192).model.kinds]
    assert kinds == [(21, 4096), (21, 0)]


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 96}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
# A model type -> what its configuration has besides, and the windows of its layers.
COUNTED = {
    "mixtral": ({"num_local_experts": 4, "sliding_window": 7}, {7: 4}),
    "qwen3_moe": (
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        {0: 4},
    ),
    "gpt_oss": ({"num_local_experts": 4, "sliding_window": 7}, {0: 2, 7: 2}),
    "mistral": ({"sliding_window": 7}, {7: 4}),
    "gemma2": ({"sliding_window": 7}, {0: 2, 7: 2}),
    "gemma3_text": ({"sliding_window": 7, "num_hidden_layers": 6}, {0: 1, 7: 5}),
}


@pytest.mark.transformers
@pytest.mark.parametrize("kind", COUNTED)
def test_parameters_and_flop_are_those_of_transformers_models(tmp_path, kind):
    """Parameters of the model on the meta device, FLOP by torch's counter, which counts scores of
    all keys: what is visible has a test of its own."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    more, windows = COUNTED[kind]
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **more})
    config._attn_implementation = config._experts_implementation = "eager"
    given = {k: v for k, v in config.to_dict().items() if k != "architectures"}
    shape = load_model(write(tmp_path / "config.json", json.loads(json.dumps(given, default=str))))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters() == sum(p.numel() for p in model.parameters())
    found = {part.window: part.layers for part in shape.parts}
    assert found == windows

    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None], use_cache=False)
    matrices = sum(x.layers * x.matrix_elements for x in shape.parts) + shape.hidden * shape.vocab
    scores = 4 * shape.q_width * tokens * shape.layers
    rotary = sum(
        flop
        for name, ops in counter.get_flop_counts().items()
        if name.endswith(("rotary_emb",))
        for flop in ops.values()
    )
    assert counter.get_total_flops() - rotary == 2 * tokens * matrices + tokens * scores


@pytest.mark.parametrize("window", [0, 1, 5, 63, 64, 200])
@pytest.mark.parametrize("documents", [(), (40, 24)])
def test_visible_keys_are_those_of_the_mask(window, documents):
    """Up to half a token: the formula counts a query's own key half, as the causal half does."""
    shape = ModelShape("mine", 1, 64, 128, 4, 4, 100, window=window)
    visible = [min(n + 1, window or n + 1) for length in documents or (64,) for n in range(length)]
    counted = attention_flop_per_token(shape, 64, documents) / (4 * shape.q_width)
    assert counted == pytest.approx(sum(visible) / 64, abs=0.51)


QWEN_MOE = config("qwen3_moe", "48 2048 6144 32 4 151936", num_experts=128)
QWEN_MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            config("mixtral", "32 4096 14336 32 8 32000", num_local_experts=8),
            "experts a token None",
        ),
        (
            config("deepseek_v3", "61 7168 18432 128 128 129280", n_routed_experts=256),
            "are planned",
        ),
        ({**QWEN_MOE, "index_topk": 2048}, "index_topk=2048: .* Ulysses and ring means nothing"),
        ({"model_type": "falcon"}, "model_type .falcon.: .* Ulysses and ring means nothing"),
        ({**QWEN_MOE, "decoder_sparse_step": 2}, "experts in some layers and an MLP in others"),
        ({**QWEN_MOE, "num_experts_per_tok": "8"}, "experts a token '8': a whole number"),
        ({**LLAMA, "sliding_window": 64, "layer_types": ["chunked"]}, "among them chunked that is"),
        (config("falcon_mamba", "64 4096 8192 32 8 65024"), "model_type 'falcon_mamba' are not kn"),
        (config("glm4", "2 64 128 4 2 100"), "does not say whether its MLP is gated"),
        (config("minicpm3", "2 64 128 4 2 100", q_lora_rank=8), "and the file has q_lora_rank"),
        (
            config("olmo3", "2 64 128 4 2 100", hidden_act="silu", sliding_window=64),
            "no layer_types says in which layers",
        ),
        ({**LLAMA, "num_local_experts": 8}, "experts are planned of model_type mixtral"),
        ({**LLAMA, "num_key_value_heads": 5}, "heads must be a multiple of kv_heads"),
        ({**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 8}, "give head_dim"),
        ({**LLAMA, "num_hidden_layers": 0}, "has no layers"),
        ({**LLAMA, "num_hidden_layers": 2.5}, "layers=2.5 must be a whole number"),
        ({**LLAMA, "sliding_window": "4k"}, "window='4k' must be a whole number"),
        ({**LLAMA, "tie_word_embeddings": "no"}, "tied='no' must be true or false"),
        ({"hidden_size": 64}, "has no layers, ffn, heads, vocab"),
        ([1, 2], "must be an object"),
        ({**LLAMA, "model_type": ["llama"]}, r"model_type \['llama'\] are not known"),
        ({**LLAMA, "num_experts": {}}, "experts are planned of model_type"),
    ],
)
def test_impossible_models(tmp_path, content, says):
    with pytest.raises(ConfigError, match=says):
        load_model(write(tmp_path / "config.json", content))


def test_unreadable_files(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    for given, says in (
        (str(tmp_path / "deep.json"), "deep.json is nested too deep for a model"),
        (str(tmp_path / "none.json"), "cannot read"),
        (str(tmp_path / "broken.json"), "is not JSON"),
        ("none", "no model 'none'; there are llama-7b"),
        ("meta-llama/Lama-3.1-8B", "'meta-llama/Lama-3.1-8B'; did you mean llama3.1-8b or"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_model(given)
