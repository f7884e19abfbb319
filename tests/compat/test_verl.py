"""verl's FSDP engines with a ring degree compute what they compute without sequence parallelism.

verl's own engines run in its overlay (``scripts/test.sh verl``). Without verl a recorded engine runs:
the names that the plug-in changes, in the order in which verl uses them, compared there with verl's.
"""

import ast
import importlib
import inspect

import pytest
import verl_runs
from harness import fork_world

needs_verl = pytest.mark.skipif(
    not verl_runs.HAS_VERL, reason="** verl IS NOT HERE: its engines do NOT run (scripts/test.sh verl)"
)
BOUND = 1e-5
MOST = {"num_attention_heads": 3, "num_key_value_heads": 1}
MIXED = {"kind": "FalconH1", "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}


@pytest.mark.skipif(verl_runs.HAS_VERL, reason="verl's own engines run")
def test_recorded_engines_are_exact_and_refuse():
    served = [
        ({}, {"ring_degree": 1}),
        ({}, {"ring_degree": 2}),
        (MOST, {"ring_degree": 2}),
        ({}, {"ring_degree": 1, "ulysses_sequence_parallel_size": 1, "attention": "eager"}),
    ]
    linear = {"layer_types": ["linear_attention", "full_attention"]}
    refused = [
        ({}, {}, "RuntimeError: verl's own attention over 2 ranks"),
        (MOST, {}, "AssertionError"),
        ({}, {"ring_degree": 3}, "ring_degree=3 does not divide ulysses_sequence_parallel_size=2"),
        ({}, {"ring_degree": True}, "must be a whole number"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, {"ring_degree": 1}, "query heads"),
        ({}, {"ring_degree": 2, "strategy": "fsdp_turbo"}, "strategy=fsdp_turbo"),
        ({}, {"ring_degree": 2, "attention": "sdpa"}, "attn_implementation=sdpa"),
        ({"kind": "Gemma3"}, {"ring_degree": 2}, "images and sounds"),
        (linear, {"ring_degree": 2}, "linear_attention"),
        ({"kind": "OPT", "word_embed_proj_dim": 32}, {"ring_degree": 2}, "packed samples begin"),
    ]
    cases = [*served, *(case[:2] for case in refused)]
    for rank in fork_world(verl_runs.run_recorded, 2, cases=cases):
        for case, errors in zip(cases, rank[: len(served)], strict=False):
            assert not isinstance(errors, str), (case, errors)
            assert max(errors) < BOUND, (case, errors)
        for (*case, text), refusal in zip(refused, rank[len(served) :], strict=True):
            assert isinstance(refusal, str) and text in refusal, (case, refusal)


# ------------------------------------------------------------------ verl itself, in its overlay

PADDED = {"pad_to_length_bucket": 50}
ACTOR, CRITIC = {"role": "actor"}, {"role": "critic"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models: an actor, one with fewer key/value heads and windows, a critic."""
    folder = tmp_path_factory.mktemp("models")
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    verl_runs.save_model(folder / "actor")
    verl_runs.save_model(folder / "windows", num_key_value_heads=1, **windows)
    verl_runs.save_model(folder / "critic", head="TokenClassification")
    verl_runs.save_model(folder / "most", **MOST)
    verl_runs.save_model(folder / "tied", tie_word_embeddings=True)
    verl_runs.save_model(folder / "mixed", **MIXED)
    return folder


def compared(models, world, references, cases):
    """Of ``cases``, names of a model with settings, the worst error against the reference of the
    same model and role, on every rank."""
    every = [(models / name, settings) for name, settings in (*references, *cases)]
    for results in fork_world(verl_runs.run_engines, world, cases=every):
        numbers = dict(zip(((name, s["role"]) for name, s in references), results, strict=False))
        for (name, settings), result in zip(cases, results[len(references) :], strict=True):
            expected = numbers[name, settings["role"]]
            assert not isinstance(result, str), (name, settings, result)
            assert result.keys() == expected.keys() - ({"grad_norm"} - result.keys())
            for key, value in result.items():
                error = (value - expected[key]).abs().max() / expected[key].abs().max()
                assert error < BOUND, (name, settings, key, error)


@needs_verl
def test_engines_compute_what_one_rank_does(models):
    alone = [("actor", ACTOR | {"sp": 1}), ("windows", ACTOR | {"sp": 1})]
    alone += [("tied", ACTOR | {"sp": 1}), ("critic", CRITIC | {"sp": 1})]
    alone += [("actor", {"role": "ref", "sp": 1})]
    fused = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
    cases = [("actor", ACTOR | {"sp": 4, "ring_degree": ring}) for ring in (1, 2, 4)]
    cases += [("actor", ACTOR | {"sp": 2, "ring_degree": ring}) for ring in (1, 2)]
    cases += [("windows", ACTOR | {"sp": 4, "ring_degree": ring}) for ring in (1, 4)]
    cases += [
        ("critic", CRITIC | {"sp": 4, "ring_degree": 2}),
        ("actor", {"role": "ref", "sp": 4, "ring_degree": 2}),
        ("actor", ACTOR | {"sp": 4, "ring_degree": 2, "pad_to_length": True} | PADDED),
        ("actor", ACTOR | {"sp": 4, "ring_degree": 2, "fsdp_size": 2}),
        ("tied", ACTOR | {"sp": 4, "ring_degree": 2, "model": fused}),
    ]
    compared(models, 4, alone, cases)


@needs_verl
def test_three_ranks(models):
    alone = [(name, ACTOR | {"sp": 1}) for name in ("actor", "most")]
    cases = [(name, ACTOR | {"sp": 3, "ring_degree": ring}) for name in ("actor", "most") for ring in (1, 3)]
    compared(models, 3, alone, cases)
