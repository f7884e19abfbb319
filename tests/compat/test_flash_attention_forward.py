"""The function that transformers' models call for flash attention, against one process.

``scripts/test.sh compat`` runs this file with each transformers of constraints.txt.
"""

from importlib.util import find_spec

import pytest

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

from flash_forward_runs import (
    LEFT,
    PACKED,
    PACKED_ROWS,
    PADDED_PACK,
    RIGHT,
    Case,
    between_layers,
    compare,
    in_one_buffer,
    on_shards,
    patched,
    refused,
    results,
)

BOUND = 1e-5
SEEN = 1e-4  # an error that a comparison must find

CASES = [
    *(Case("llama", rows, 2) for rows in (PACKED_ROWS, RIGHT)),
    Case("llama", PACKED, 1, layout="zigzag"),
    Case("qwen3", PACKED, 4, "reentrant"),
    Case("qwen3", LEFT, 2, "plain"),
    Case("gemma2", PACKED, 2, "plain"),
    Case("gemma2", PACKED, 4, lengths=True),
    Case("gemma2", RIGHT, 1, "reentrant"),
    Case("gpt_oss", PACKED, 4),
    Case("gpt_oss", PADDED_PACK, 2, "reentrant"),
]
PLANTED = [
    Case("gemma2", PACKED, 2, plant=name)
    for name in ("", "softcap", "sliding_window", "position_ids", "softmax_scale")
] + [Case("gpt_oss", PACKED, 2, plant="s_aux")]


def outcomes_of(pool, cases, world):
    """Of the models that this transformers has."""
    outcomes, *_ = pool.run(compare, world, cases=cases)
    pairs = [(case, out) for case, out in zip(cases, outcomes, strict=True) if out is not None]
    assert pairs
    return pairs


def test_every_gradient_is_that_of_one_process(pool):
    for case, out in outcomes_of(pool, CASES, 4):
        assert out.error <= BOUND, (case, out)
        # Once a pass, none in a recomputation, and none where lengths are given.
        assert out.gathers == (1 if case.lengths else 2), (case, out)
        assert out.calls == out.layers * (3 if case.recompute else 2), (case, out)


def test_positions_in_a_buffer_that_is_filled_again(pool):
    for errors, gathers in pool.run(in_one_buffer, 2):
        assert max(errors) <= BOUND and gathers == len(errors), errors
    for errors, raised in pool.run(between_layers, 2):
        assert max(errors.values()) <= BOUND and raised == "MeshError", (errors, raised)
    errors, _ = pool.run(between_layers, 2, plant=True)[0]
    # Without contents: one index tells two models apart, and versions what torch writes.
    exact = {name for name, e in errors.items() if e <= BOUND}
    assert exact == {name for name in errors if "models" in name or "copy_" in name}, errors


NOT_OF_A_SHARD = {
    "longrope 36": "RoPE (longrope)",
    "dynamic 36": "RoPE (dynamic)",
    "dynamic 36 later": "RoPE (dynamic)",
    "state": "carry a state from token to token",
    "chunks": "chunks of 30 tokens",
    "counted": "counts the tokens",
    "bart": "takes no position_ids",
    "bigcode lengths": "hands none on",  # packed, without lengths
}


def test_what_else_depends_on_the_length_is_refused(pool):
    for found in pool.run(on_shards, 2):
        assert not found or NOT_OF_A_SHARD.keys() <= found.keys()
        for kind, result in found.items():
            refusal = NOT_OF_A_SHARD.get(kind, NOT_OF_A_SHARD.get(kind.removesuffix(" lengths")))
            if refusal is None:
                assert isinstance(result, float) and result <= BOUND, (kind, result)
            else:
                assert isinstance(result, str) and refusal in result, (kind, result)


def test_a_broken_argument_is_found(pool):
    for case, out in outcomes_of(pool, PLANTED, 2):
        assert out.error > SEEN if case.plant else out.error <= BOUND, (case, out)


REFUSED = {
    "dropout": ("UnsupportedAttentionError", "attention_dropout to 0"),
    "window of none": ("ConfigError", "sliding_window=0 must be 1 or more"),
    "full window": ("UnsupportedAttentionError", "sliding_window=3 of full attention"),
    "deterministic": ("UnsupportedAttentionError", "use_deterministic_algorithms"),
    "cache": ("UnsupportedAttentionError", "1 queries and 8 keys"),
    "something new": ("UnsupportedAttentionError", "is given new_mask"),
    "weights": ("UnsupportedAttentionError", "output_attentions"),
    "one of two lengths": ("DataError", "give both"),
    "other lengths of keys": ("UnsupportedAttentionError", "cu_seq_lens_k differ"),
    "lengths of the shard": ("DataError", "end at 8, and the 2 ranks hold 8 tokens each, 16"),
    "lengths beside one document": ("DataError", "in row 0 at token 5"),
    "lengths and padding": ("DataError", "beside cu_seq_lens_q"),
    "whole positions": ("DataError", "position_ids [1, 16] with queries of 1 rows of 8 tokens"),
    "positions of images": ("DataError", "position_ids [3, 1, 8]"),
    "mask of pairs": ("DataError", "attention_mask is [1, 1, 8, 8]"),
    "documents as a mask": ("DataError", "numbers other than 0 and 1"),
    "a jump": ("DataError", "are 2 at token 1"),
    "negative positions": ("DataError", "they are integers of 0 and more"),
    "positions in fp32": ("DataError", "position_ids of torch.float32"),
    "known lengths, two rows": ("DataError", "with a batch of 2 rows"),
    "forgotten positions": ("DataError", "equal_documents=True"),
    "full without positions": ("UnsupportedAttentionError", "give towers"),
    "padding without positions": ("DataError", "without position_ids"),
    "softcap": ("ConfigError", "softcap=-1.0"),
}
ON_ONE_RANK = {
    "on rank 1": "attention dropout of 0.1",
    "a mask of rank 1, no positions": "without position_ids",
    "lengths on rank 1": "",
    "other lengths on rank 1": "",
    "other padding": "different padding",
    "padding in one buffer": "different padding",
    "lengths of another batch": "contradict each other in row 0 at token 3",
    "as the next shard shows": "in row 0 at token 8",
}


def test_what_is_not_exact_is_refused_on_every_rank(pool):
    by_rank = pool.run(refused, 2)
    for errors in by_rank:
        assert errors.keys() == {*REFUSED, *ON_ONE_RANK}
        for name, (kind, text) in REFUSED.items():
            assert errors[name][0] == kind and text in errors[name][1], (name, errors[name])
    for name, text in ON_ONE_RANK.items():
        kinds = [errors[name][0] for errors in by_rank]
        assert "MeshError" in kinds and all(kinds), (name, by_rank[0][name], by_rank[1][name])
        assert all(text in errors[name][1] for errors in by_rank), (name, by_rank)


def test_calls_and_the_patch(pool):
    for held in (*pool.run(results, 2), *pool.run(patched, 2)):
        assert all(held.values()), held
