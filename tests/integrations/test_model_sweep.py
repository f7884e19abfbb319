"""Every causal language model of transformers, and models with towers: exact on two ranks, or
refused in our words.

scripts/test.sh transformers -k sweep --write-support-table     # write the table in docs anew
"""

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from harness import RankContext, WorkerPool
from model_runs import BOUND, MESHES, PAIRS, plain_batch, sweep_case
from test_prefix_trees import tree_case
from tiny_models import (
    FP64,
    HAS_STATES,
    MASKED,
    NOT_BUILT,
    OVERRIDES,
    config,
    model_class,
    model_types,
    read,
)
from tiny_towers import TRIED, tower_case

from ds_usp import MaskSpec
from ds_usp.integrations.transformers import attention
from ds_usp.integrations.transformers.refusals import OLDEST, OLDEST_WITH_STATES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "transformers-models.md"
TYPES = [name for name in model_types() if name not in NOT_BUILT]
TREES = "## Trees of shared prefixes"  # the part of the page that takes minutes
Outcome = dict[str, float | str]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """What was found so far, by model type."""
    return {}


def first_pairs(model_type: str) -> tuple[str, ...]:
    """Each batch on one of the two meshes, and on the other one with the next type."""
    plain_first, plain_second, packed_first, packed_second = PAIRS
    even = TYPES.index(model_type) % 2 == 0
    return (plain_first, packed_second) if even else (plain_second, packed_first)


def run(
    pool: WorkerPool,
    outcomes: dict[str, Outcome],
    model_type: str,
    pairs: tuple[str, ...] | None = None,
) -> Outcome:
    """All outcomes of a type that have been found: those of ``pairs``, or of its first ones, and
    those of earlier calls."""
    found = outcomes.setdefault(model_type, {})
    missing = [pair for pair in pairs or first_pairs(model_type) if pair not in found]
    if missing:
        plain, packed = pool.run(sweep_case, 2, model_type=model_type, pairs=missing)
        found |= {**plain, **packed}
    return {pair: found[pair] for pair in PAIRS if pair in found}


def check(model_type: str, found: Outcome) -> None:
    wrong = {name: x for name, x in found.items() if isinstance(x, float) and not x <= BOUND}
    assert not wrong, f"{model_type} is neither exact nor refused: {found}"


@pytest.mark.parametrize("model_type", TYPES)
def test_the_model_is_exact_or_refused(pool, outcomes, model_type):
    check(model_type, run(pool, outcomes, model_type))


@pytest.mark.parametrize("model_type", TYPES)
def test_the_model_is_so_on_either_mesh(pool, outcomes, model_type):
    found = run(pool, outcomes, model_type, PAIRS)
    check(model_type, found)
    for batch in ("plain", "packed"):
        on_each_mesh = {isinstance(x, str) for name, x in found.items() if batch in name}
        assert len(on_each_mesh) == 1, f"{model_type}: refused on one mesh only: {found}"


def masked_cases(ctx: RankContext) -> dict[str, Outcome]:
    return {name: sweep_case(ctx, name, masked=True) for name in MASKED if name != "mobilebert"}


def test_masked_models_are_exact_or_refused(pool):
    plain, packed = pool.run(masked_cases, 2)
    found = {name: {**plain[name], **packed[name]} for name in plain}
    errors = {
        (name, case): x
        for name, of in found.items()
        for case, x in of.items()
        if not isinstance(x, str)
    }
    assert not {case: x for case, x in errors.items() if not x <= BOUND}
    assert len(errors) >= 4 * 14


@pytest.mark.parametrize("model_type", TRIED)
def test_images_and_sounds_are_exact_or_refused(pool, outcomes, model_type):
    check(model_type, run_tower(pool, outcomes, model_type))


@pytest.mark.parametrize("model_type", TRIED)
def test_images_and_sounds_are_so_on_either_mesh(pool, outcomes, model_type):
    check(model_type, run_tower(pool, outcomes, model_type, tuple(MESHES)))


# What a tiny model may hold of its class's default: fewer than a batch's tokens, or its experts.
FEWER_THAN_TOKENS = ("index_topk", "indexer_budget", "sliding_window", "attention_chunk_size")
FEWER_THAN_TOKENS += ("attention_window_size", "window_size", "sliding_window_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")


def shortfalls(model_type: str) -> list[str]:
    """Name the parts of a type's default configuration that its tiny model does not use."""
    cls, tiny = model_class(model_type), config(model_type)
    text = tiny.get_text_config()
    default = read(type(text))
    unused = [
        f"{name} without {kind}"
        for name in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
        for kind in set(read(default, name) or ()) - set(read(text, name) or ())
    ]
    tokens = plain_batch()["input_ids"].shape[1]
    sizes = {name: read(text, name) for name in (*FEWER_THAN_TOKENS, *EXPERTS, *CHOSEN)}
    sizes = {name: x for name, x in sizes.items() if isinstance(x, int) and x > 0}
    unused += [f"{x}={sizes[x]}" for x in FEWER_THAN_TOKENS if sizes.get(x, 0) >= tokens]
    if read(text, "index_topk_blocks", 0) * read(text, "index_block_size", 0) >= tokens:
        unused.append("blocks of all tokens")
    experts, chosen = (
        min(sizes[x] for x in y if x in sizes) if y & sizes.keys() else 0
        for y in (set(EXPERTS), set(CHOSEN))
    )
    unused += [f"{chosen} of {experts} experts"] if experts and chosen >= experts else []
    indexers = [x for x in vars(sys.modules[cls.__module__]) if x.endswith("Indexer")]
    if indexers:
        with torch.device("meta"):
            kinds = {type(module).__name__ for module in cls._from_config(tiny).modules()}
        unused += [] if kinds & set(indexers) else ["no indexer"]
    return unused


@pytest.mark.skipif(not HAS_STATES, reason="the overrides are of a newer transformers")
def test_tiny_models_use_what_their_names_stand_for():
    short = {name: unused for name in TYPES if (unused := shortfalls(name))}
    assert not short
    dense = {"layer_types": ["full_attention"] * 2}  # as the sweep once had it
    with mock.patch.dict(OVERRIDES, {"minimax_m3_vl_text": dense}):
        assert shortfalls("minimax_m3_vl_text") == ["no indexer"]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_STATES, reason="the page is of a newer transformers")
def test_types_are_exact_in_trees_too_or_refused(pool, outcomes, pytestconfig):
    exact, refused = list[str](), defaultdict[str, list[str]](list)
    for name in TYPES:
        if all(isinstance(x, str) for x in run(pool, outcomes, name).values()):
            continue
        found = list(pool.run(tree_case, 2, model_type=name)[0].values())
        reasons = {reason(x) for x in found if isinstance(x, str)}
        assert len(reasons) == 1 or max(found) <= BOUND, (name, found)
        (refused[reasons.pop()] if reasons else exact).append(name)
    count = sum(len(names) for names in refused.values())
    text = "\n".join(
        [
            TREES,
            "",
            "The same tiny models, on a batch whose rows are one [tree]"
            "(../usage/packed-and-trees.md#trees) of shared prefixes, three levels deep, against "
            f"each row by itself: of {len(exact) + count} types that are exact on packed "
            f"documents, {len(exact)} are exact in trees, and {count} refuse them:",
            "",
            "| reason | model types |",
            "|---|---|",
            *(f"| {why} | {listed(names)} |" for why, names in sorted(refused.items())),
            "",
        ]
    )
    shown, mark, of_trees = PAGE.read_text(encoding="utf-8").partition(TREES)
    if pytestconfig.getoption("--write-support-table"):
        PAGE.write_text(shown.rstrip("\n") + "\n\n" + text, encoding="utf-8")
    elif f"transformers {transformers.__version__}:" in shown:
        assert mark + of_trees == text, f"{PAGE} is out of date: --write-support-table"


def run_tower(
    pool: WorkerPool,
    outcomes: dict[str, Outcome],
    model_type: str,
    meshes: tuple[str, ...] = (),
) -> Outcome:
    """:func:`run` of a type with its tower: by default on one mesh, with the next type on the
    other one."""
    found = outcomes.setdefault(f"{model_type} with its tower", {})
    first_mesh = tuple(MESHES)[TRIED.index(model_type) % 2]
    missing = [mesh for mesh in meshes or (first_mesh,) if mesh not in found]
    if missing:
        first, second = pool.run(tower_case, 2, model_type=model_type, meshes=missing)
        found |= first | {f"{mesh}, rank 1": x for mesh, x in second.items()}
    return found


def causal_masks(ctx: RankContext, model_type: str) -> Outcome:
    """The sweep with an attention that knows neither documents nor windows."""
    right = attention.mask_of
    attention.mask_of = lambda *_: MaskSpec.causal()
    try:
        return sweep_case(ctx, model_type, layout="zigzag")
    finally:
        attention.mask_of = right


@pytest.mark.parametrize(("model_type", "wrong"), [("llama", "packed"), ("mistral", "plain")])
def test_the_sweep_sees_a_wrong_mask(pool, model_type, wrong):
    plain, packed = pool.run(causal_masks, 2, model_type=model_type)
    for name, error in {**plain, **packed}.items():
        assert not name.startswith(wrong) or error > 1e-2, f"{name}: {error}"


def test_the_page_lists_what_is_exact_and_what_is_refused(pool, outcomes, pytestconfig):
    text = page(
        {name: run(pool, outcomes, name) for name in TYPES},
        {name: run_tower(pool, outcomes, name) for name in TRIED},
    )
    shown, mark, of_trees = PAGE.read_text(encoding="utf-8").partition(TREES)
    if pytestconfig.getoption("--write-support-table"):
        PAGE.write_text(text + ("\n" if mark else "") + mark + of_trees, encoding="utf-8")
        return
    version = re.search(r"transformers (\d[\w.]*)", shown)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"the page is of transformers {version[1]}, this is {transformers.__version__}")
    assert shown.rstrip("\n") + "\n" == text, (
        "docs/reference/transformers-models.md is out of date; write it anew with "
        "scripts/test.sh transformers -k sweep --write-support-table"
    )


def page(outcomes: dict[str, Outcome], with_towers: dict[str, Outcome]) -> str:
    """The page: counts, then model types by outcome."""
    exact, with_positions = [], []
    refused: dict[str, list[str]] = defaultdict(list)
    for name, found in outcomes.items():
        reasons = [x for x in found.values() if isinstance(x, str)]
        if not reasons:
            exact.append(name)
        elif len(reasons) < len(found) and "give position_ids" in reasons[0]:
            with_positions.append(name)
        else:
            refused[reason(reasons[0])].append(name)
    count = sum(len(names) for names in refused.values())
    lines = [
        "# Models of transformers",
        "",
        f"What `enable` of `ds_usp.integrations.transformers` does with transformers "
        f"{transformers.__version__}: written by `tests/integrations/test_model_sweep.py`, which "
        "runs a tiny random model of each type on 2 ranks, as ulysses 2 and as ring 2, on a plain "
        "batch and on packed documents, forward and backward. *Exact*: loss, logits and the "
        f"gradient of every parameter are within {BOUND:g} (relative) of those of one process, "
        "which computes each packed document alone. What is not exact is refused.",
        "",
        f"With earlier versions, from {OLDEST} on, `scripts/test.sh versions` runs the same sweep: "
        "every type that a version has is exact or refused there too. Layers that carry a state "
        f"are served from {OLDEST_WITH_STATES} on. The command `python -m "
        "ds_usp.integrations.transformers TYPE` answers for the version that is installed.",
        "",
        "| outcome | model types |",
        "|---|---:|",
        f"| exact, plain and packed | {len(exact)} |",
        f"| exact where `position_ids` are given, else refused | {len(with_positions)} |",
        f"| refused | {count} |",
        f"| not tried: no tiny model of its own can be made | {len(NOT_BUILT)} |",
        f"| all causal language models of transformers | {len(model_types())} |",
        "",
        "## Exact",
        "",
        listed(exact),
        "",
        f"In fp64, because fp32 without a mesh is off by more than the bound: {listed(FP64)}.",
        "",
        "Where `position_ids` are given (they do not count positions from 0): "
        f"{listed(with_positions)}.",
        "",
        "## Refused",
        "",
        "| reason | model types |",
        "|---|---|",
        *(f"| {why} | {listed(names)} |" for why, names in sorted(refused.items(), key=by_count)),
        "",
        "## Images and sounds",
        "",
        "Models with a tower, given a batch that has an image or a sound in each row "
        "(`pixel_values`, `input_features` and what the processor makes beside them): every rank "
        "runs the tower whole, the text model is sharded. The gradients of the tower are compared "
        "too. Of types that are in no table the text model decides: ask the command.",
        "",
        "| outcome | model types |",
        "|---|---|",
        *(f"| {outcome} | {listed(names)} |" for outcome, names in by_outcome(with_towers)),
        "",
        "## Not tried",
        "",
        "| model type | |",
        "|---|---|",
        *(f"| `{name}` | {why} |" for name, why in NOT_BUILT.items()),
    ]
    return "\n".join(lines) + "\n"


def by_outcome(outcomes: dict[str, Outcome]) -> Any:
    """Exact first, then refusals by their reasons."""
    rows: dict[str, list[str]] = {"exact": []}
    for name, found in outcomes.items():
        refusals = [x for x in found.values() if isinstance(x, str)]
        rows.setdefault(f"refused: {reason(refusals[0])}" if refusals else "exact", []).append(name)
    return rows.items()


def reason(message: str) -> str:
    """The first clause of a refusal, without the name of a class."""
    clause = re.sub(r"^\w*[A-Z]\w+:? ", "", message)
    clause = re.sub(r" \([^)]*\)+| \[[^]]*\]", "", clause)
    return re.split(r"[:;,.]\s|$", clause)[0]


def by_count(row: tuple[str, list[str]]) -> Any:
    return -len(row[1]), row[0]


def listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
