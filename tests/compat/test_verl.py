"""verl's FSDP engines with a ring degree compute what they compute without sequence parallelism.

verl's own engines run in its overlay (``scripts/test.sh verl``). Without verl a recorded engine
runs: the names that the plug-in changes, in the order in which verl uses them; the overlay's run
compares them with verl's.
"""

import ast
import re
import sys

import pytest
import verl_runs
from harness import fork_world
from programs import ROOT, python

needs_verl = pytest.mark.skipif(
    not verl_runs.HAS_VERL,
    reason="** verl IS NOT HERE: its engines do NOT run (scripts/test.sh verl)",
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
        ({}, {"ring_degree": 2, "documents": (6, 6)}),  # each fills a shard
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
        (
            {},
            {"ring_degree": 2, "stateful": True},
            "Qwen3ForCausalLM: its layers (stateful) carry a state",
        ),
        ({}, {"ring_degree": 2, "bare_call": "inside"}, "where packed samples begin"),
        ({}, {"ring_degree": 2, "bare_call": "outside"}, "verl's own attention over 2 ranks"),
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
    ]
    tree = {"sp": 4, "ring_degree": 2, "share_prefixes": True}
    cases += [
        ("actor", ACTOR | tree | {"ring_degree": 1}),
        ("actor", ACTOR | tree | {"sp": 2}),
        ("actor", ACTOR | tree | {"pad_to_length": True} | PADDED),
        ("actor", {"role": "ref"} | tree),
        ("critic", CRITIC | tree),
        # Last: verl leaves its fused forward in the class.
        ("tied", ACTOR | {"sp": 4, "ring_degree": 2, "model": fused}),
        ("tied", ACTOR | tree | {"model": fused}),
    ]
    compared(models, 4, alone, cases)


@needs_verl
def test_three_ranks_with_heads_that_do_and_do_not_divide(models):
    names = ("actor", "most")
    alone = [(name, ACTOR | {"sp": 1}) for name in names]
    rings = [ACTOR | {"sp": 3, "ring_degree": ring} for ring in (1, 3)]
    compared(models, 3, alone, [(name, settings) for name in names for settings in rings])


@needs_verl
def test_engines_refuse(models):
    ring = {"sp": 2, "ring_degree": 2}
    eager = {"override_config": {"attn_implementation": "eager"}}
    refused = [
        ("actor", ACTOR | ring | {"ring_degree": 3}, "does not divide"),
        ("actor", ACTOR | ring | {"model": eager}, "attn_implementation=eager"),
        ("actor", ACTOR | ring | {"strategy": "fsdp_turbo"}, "strategy=fsdp_turbo"),
        ("actor", ACTOR | {"sp": 2, "share_prefixes": True}, "ring_degree=None"),
        ("mixed", ACTOR | ring, "falcon_h1: it has layers of kind hybrid"),
        ("most", ACTOR | {"sp": 2}, "num_attention_heads 3 must be divisible by ulysses_sp_size 2"),
    ]
    cases = [(models / name, settings) for name, settings, _ in refused]
    for results in fork_world(verl_runs.run_engines, 2, cases=cases):
        for (*case, text), result in zip(refused, results, strict=True):
            assert isinstance(result, str) and text in result, (case, result)


@needs_verl
def test_the_recorded_engine_has_what_verl_has():
    compared_names = 0
    for path in verl_runs.RECORDED.rglob("*.py"):
        names = path.relative_to(verl_runs.RECORDED)
        of_verl = ast.parse((verl_runs.VERL / names.relative_to("verl")).read_text())
        for name, parameters in signatures(ast.parse(path.read_text())).items():
            assert signatures(of_verl)[name] == parameters, (names, name)
            compared_names += 1
    assert compared_names > 12


def signatures(tree):
    """Names of the parameters of functions and methods, by their names; classes without."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = None
            found |= {f"{node.name}.{name}": x for name, x in signatures(node).items()}
        elif isinstance(node, ast.FunctionDef):
            parameters = node.args
            every = [*parameters.posonlyargs, *parameters.args, parameters.vararg]
            every += [*parameters.kwonlyargs, parameters.kwarg]
            found[node.name] = [parameter.arg for parameter in every if parameter]
    return found


TWO_AT_ONCE = """
from types import SimpleNamespace
from ds_usp.compat import verl

changer, (first, second) = verl._Changer(), verl._CHANGES
def find_spec(name):  # as another thread would, while this one looks for the first
    inner = changer.find_spec(second, None) if name == first else "found"
    return SimpleNamespace(loader=SimpleNamespace(exec_module=None), inner=inner)
verl.find_spec = find_spec
print(changer.find_spec(first, None).inner.inner)
"""


def test_modules_that_two_threads_import_at_once_are_both_changed():
    ran = python("-c", TWO_AT_ONCE)
    assert ran.stdout == "found\n", ran.stderr


CONFIGS = """
import pathlib, pickle, sys
import verl
from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass
folder = pathlib.Path(verl.__file__).parent / "trainer" / "config"
small = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
with initialize_config_dir(str(folder), version_base=None):
    config = compose("ppo_trainer", [*sys.argv[1:], *small])
    degrees = ["engine.ulysses_sequence_parallel_size=8", "+engine.ring_degree=2"]
    sft = compose("sft_trainer_engine", degrees)
actor_rollout_ref = config.actor_rollout_ref
actor = omega_conf_to_dataclass(actor_rollout_ref.actor).engine
parts = (actor_rollout_ref.ref.fsdp_config, config.critic.fsdp, sft.engine)
for engine in (actor, pickle.loads(pickle.dumps(actor)), *map(omega_conf_to_dataclass, parts)):
    print(type(engine).__name__, engine.ulysses_sequence_parallel_size, engine.ring_degree)
print("verl.workers.engine" in sys.modules)
"""


@needs_verl
def test_verl_finds_the_plugin_and_takes_the_command_line_of_the_page(tmp_path):
    """As installed: the entry point of setup.py in the metadata of a package."""
    (entry,) = re.findall(r'"verl.plugins": \["(.+)"\]', (ROOT / "setup.py").read_text())
    metadata = tmp_path / "ds_usp-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-usp\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[verl.plugins]\n{entry}\n")
    page = (ROOT / "docs" / "usage" / "verl.md").read_text()
    (overrides,) = re.findall(r"^```text\n(.+?)^```", page, re.MULTILINE | re.DOTALL)
    path = f"{tmp_path}:{':'.join(filter(None, sys.path))}"
    arguments = ("-c", CONFIGS, *overrides.split())
    found = python(*arguments, PYTHONPATH=path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-6:] == ["FSDPEngineConfig 8 2"] * 5 + ["False"]
    without = python(*arguments, PYTHONPATH=path, VERL_USE_EXTERNAL_PLUGINS="none")
    assert "unexpected keyword argument 'ring_degree'" in without.stderr
