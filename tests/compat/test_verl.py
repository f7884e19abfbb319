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
        (MIXED, {"ring_degree": 2}, "FalconH1ForCausalLM has layers that carry a state"),
        ({"kind": "OPT", "word_embed_proj_dim": 32}, {"ring_degree": 2}, "packed samples begin"),
    ]
    cases = [*served, *(case[:2] for case in refused)]
    for rank in fork_world(verl_runs.run_recorded, 2, cases=cases):
        for case, errors in zip(cases, rank[: len(served)], strict=False):
            assert not isinstance(errors, str), (case, errors)
            assert max(errors) < BOUND, (case, errors)
        for (*case, text), refusal in zip(refused, rank[len(served) :], strict=True):
            assert isinstance(refusal, str) and text in refusal, (case, refusal)
