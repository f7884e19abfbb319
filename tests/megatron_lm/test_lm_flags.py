"""The flags that the patches add to Megatron-LM, what becomes of its own, and what is refused."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from argument_page import APART, unnamed
from lm_start import LOCAL, Starts

CP4 = f"{LOCAL} --context-parallel-size 4"
TE = "2.20.2"


@pytest.mark.parametrize(
    ("flags", "ulysses"),
    [
        ("", None),
        ("--ulysses-degree 2", 2),
        ("--ulysses-degree 1 --cp-comm-type usp", 1),
        ("--cp-comm-type usp usp", None),
        ("--hierarchical-context-parallel-sizes 2 2", None),
        ("--hierarchical-context-parallel-sizes 2 2 --ulysses-degree 2", 2),
    ],
)
def test_context_parallelism_is_usp(starts, flags, ulysses):
    answer = starts.start(f"{CP4} {flags}")
    assert set(answer["args"]["cp_comm_type"]) == {"usp"}
    expected = {
        "ulysses_degree": ulysses,
        "layout": "context_parallel",
        "kernel": "auto",
        "everywhere": False,
    }
    assert answer["settings"] == expected


def test_the_settings_of_apply_are_defaults_of_the_flags(starts):
    defaults = {"ulysses_degree": 2, "kernel": "sdpa"}
    given = starts.start(f"{CP4} --ulysses-degree 1", settings=defaults)["settings"]
    left_out = starts.start(CP4, settings=defaults)["settings"]
    assert (given["ulysses_degree"], given["kernel"]) == (1, "sdpa")
    assert (left_out["ulysses_degree"], left_out["kernel"]) == (2, "sdpa")


def test_transformer_engines_own_context_parallelism_is_left_alone(starts):
    answer = starts.start("--context-parallel-size 4 --cp-comm-type p2p", installed=TE)
    assert answer["settings"] is None
    assert answer["args"]["cp_comm_type"] == ["p2p"]
    assert "--cp-comm-type p2p: context parallelism is TransformerEngine's own" in answer["printed"]
    other = starts.start("--context-parallel-size 4 --cp-comm-type p2p", installed=TE, rank=1)
    assert "TransformerEngine's own" not in other["printed"]


def test_layers_may_differ(starts):
    flags = "--context-parallel-size 4 --cp-comm-type usp p2p --ulysses-degree 4"
    answer = starts.start(f"{flags} --attention-backend fused", installed=TE)
    assert answer["args"]["cp_comm_type"] == ["usp", "p2p"]
    assert answer["settings"]["ulysses_degree"] == 4


def test_one_rank_a_sequence_is_megatron_lms_own(starts):
    answer = starts.start(f"{LOCAL} --usp-kernel sdpa --attention-dropout 0.1 --ulysses-degree 1")
    assert answer["args"]["cp_comm_type"] == ["p2p"]
    assert "--usp-kernel sdpa has no effect with --context-parallel-size 1" in answer["printed"]
    kept = starts.start(f"{LOCAL} --usp-recompute attention --usp-kernel sdpa")
    assert kept["settings"]["everywhere"]
    assert "has no effect" not in kept["printed"]


def test_the_planner_chooses_a_degree_and_rank_0_says_why(starts):
    flags = f"{CP4} --ulysses-degree auto --usp-cluster h100 --bf16 --use-distributed-optimizer"
    answer = starts.start(f"{flags} --sequence-parallel --tensor-model-parallel-size 2")
    assert answer["settings"]["ulysses_degree"] in (1, 2, 4)
    assert f"planner: ulysses {answer['settings']['ulysses_degree']} x ring" in answer["printed"]
    other = starts.start(flags, rank=3)
    assert "planner:" not in other["printed"]
    assert starts.start(f"{LOCAL} --ulysses-degree auto")["settings"]["ulysses_degree"] is None


def test_one_hardware_queue_is_demanded_under_tensor_parallelism_alone(starts):
    tp2 = f"{CP4} --tensor-model-parallel-size 2"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in starts.error(tp2, hopper=True)
    p2p = "--context-parallel-size 4 --cp-comm-type p2p"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in starts.error(p2p, hopper=True, installed=TE)
    assert starts.start(CP4, hopper=True)["settings"]


def test_layers_that_carry_a_state_start(starts):
    served = f"{CP4} --ulysses-degree 2"
    assert starts.start(f"{served} --hybrid-attention-ratio 0.5")["settings"]
    delta_nets = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2"
    assert starts.start(f"{served} {delta_nets}")["settings"]


def test_no_dense_mask_is_made(starts):
    assert not starts.start(CP4)["args"]["create_attention_mask_in_dataloader"]
    assert starts.start(LOCAL)["args"]["create_attention_mask_in_dataloader"]


@pytest.fixture(scope="module")
def copy(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout, to be edited."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    for name in ("megatron", "pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        source, target = checkout / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    subprocess.run(["chmod", "-R", "u+w", str(folder)], check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("megatron/training/arguments.py", "def parse_args(", "def parse_args(  # same\n", ""),
        (
            "megatron/core/utils.py",
            "index[0].fill_(cp_rank)",
            "index[0].fill_(2 * cp_rank)",
            "megatron.core.utils:get_batch_on_this_cp_rank: its source is another",
        ),
        (
            "pretrain_gpt.py",
            "loss = torch.sum(losses * loss_mask)",
            "loss = torch.mean(losses * loss_mask)",
            "pretrain_gpt:loss_func: its source is another",
        ),
        (
            "megatron/core/transformer/dot_product_attention.py",
            "matmul_result = torch.baddbmm(",
            "matmul_result = 2 * torch.baddbmm(",
            "An edit has no effect: USPCoreAttention computes scores",
        ),
        (
            "megatron/core/package_info.py",
            "MINOR = 16",
            "MINOR = 17",
            "needs megatron-core >=0.16,<0.17, found 0.17.1",
        ),
    ],
)
def test_check_names_an_edit(copy, file, old, new, message):
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    try:
        checked = subprocess.run(
            [sys.executable, "-m", "megatron_patches", "--framework", "megatron_lm", "--check"],
            env={**os.environ, "MEGATRON_LM_PATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        (copy / file).write_text(text, encoding="utf-8")
    assert checked.returncode == bool(message), checked.stderr
    assert message in checked.stderr
    assert message or f"megatron_lm at {copy} matches" in checked.stdout


def test_gemm_last_refuses_an_edited_mlp(copy):
    file = copy / "megatron/core/transformer/mlp.py"
    text = file.read_text(encoding="utf-8")
    edited = text.replace("self.linear_fc1(hidden_states)", "self.linear_fc1(2 * hidden_states)")
    assert edited != text
    file.write_text(edited, encoding="utf-8")
    edited_starts = Starts(copy)
    flags = f"{CP4} --no-bias-gelu-fusion --no-gradient-accumulation-fusion"
    try:
        refused = edited_starts.error(f"{flags} --usp-recompute gemm-last")
        started = edited_starts.start(flags)
    finally:
        edited_starts.close()
        file.write_text(text, encoding="utf-8")
    assert "megatron.core.transformer.mlp:MLP.forward: its source is another" in refused
    assert started["settings"]


CP = f"{LOCAL} --context-parallel-size"
SERVED = f"{CP} 4 --ulysses-degree 2"
EXPERTS = f"{SERVED} --num-experts 2"
PER_TOKEN = "--calculate-per-token-loss"
# Flags, and the flag, number or word that the message names.
REFUSED = [
    (f"{LOCAL} --ulysses-degree 2", "--context-parallel-size 1"),
    (f"{CP} 4 --ulysses-degree 3", "4 (ring 1)"),
    (f"{CP} 8 --tensor-model-parallel-size 2 --world-size 16", "--world-size 16"),
    (f"{CP} 4 --tensor-model-parallel-size 4", "--ulysses-degree 4"),
    (f"{SERVED} --cp-comm-type p2p", "p2p"),
    (f"{SERVED} --cp-comm-type usp usp usp", "3 entries"),
    (f"{SERVED} --cp-comm-type allgather", "--cp-comm-type allgather"),
    (f"{SERVED} --hierarchical-context-parallel-sizes 4 1", "[2, 2]"),
    (f"{SERVED} --usp-cluster h100", "--ulysses-degree auto"),
    (f"{SERVED} --attention-dropout 0.1", "--attention-dropout 0"),
    (f"{SERVED} --position-embedding-type relative", "position embeddings"),
    (
        f"{SERVED} --multi-latent-attention --position-embedding-type rope "
        "--tensor-model-parallel-size 2",
        "--multi-latent-attention",
    ),
    (f"{SERVED} --attention-backend flash", "--attention-backend flash"),
    (f"{SERVED} --reset-attention-mask", "--reset-attention-mask"),
    (f"{SERVED} --batch-invariant-mode", "--batch-invariant-mode"),
    (f"{SERVED} --hybrid-context-parallel {PER_TOKEN}", "--hybrid-context-parallel"),
    (f"{CP} 4 --ulysses-degree auto --hybrid-attention-ratio 0.5", "Mamba"),
    (f"{SERVED} --usp-mlp-chunks 4 --is-hybrid-model", "--usp-mlp-chunks"),
    (f"{SERVED} --usp-recompute gemm-last --hybrid-override-pattern M*", "--usp-recompute"),
    (f"{SERVED} --sft --tensor-model-parallel-size 2", "--tensor-model-parallel-size 1"),
    (f"{SERVED} --position-embedding-type mrope --mrope-section 2 1 1", "mrope"),
    (f"{SERVED} --window-size 8,4", "--window-size 8,0"),
    (f"{EXPERTS} --moe-aux-loss-coeff 0.1 {PER_TOKEN}", PER_TOKEN),
    (f"{EXPERTS} --moe-z-loss-coeff 0.1 {PER_TOKEN}", PER_TOKEN),
    (f"{EXPERTS} --moe-expert-capacity-factor 1", "--moe-expert-capacity-factor 1.0"),
    (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "aux_loss, seq_aux_loss"),
    (f"{EXPERTS} --moe-router-force-load-balancing", "draws experts at random"),
    (f"{SERVED} --sft --pipeline-model-parallel-size 2", "stage"),
    (
        f"{SERVED} --mtp-num-layers 1 --position-embedding-type rope --cp-comm-type usp usp",
        "--mtp-num-layers 1",
    ),
    (f"{SERVED} --cuda-graph-impl local", "--cuda-graph-impl local"),
    (f"{SERVED} --cpu-offloading-num-layers 1", "offloading"),
    (f"{SERVED} --overlap-moe-expert-parallel-comm", "--overlap-moe-expert-parallel-comm"),
    (f"{SERVED} --fake-process-group", "--fake-process-group"),
    (f"{SERVED} --experimental-attention-variant dsa", "--experimental-attention-variant dsa"),
    (f"{SERVED} --use-legacy-models --ckpt-format torch", "legacy models"),
    (f"{SERVED} --transformer-impl inference_optimized", "--transformer-impl inference_optimized"),
    (f"{SERVED} --seq-length 60", "context-parallel-size"),
    ("", "TransformerEngine 2.9.0a0"),
    (f"{SERVED} --usp-recompute full --recompute-activations", "--recompute-granularity"),
    (f"{SERVED} --usp-mlp-chunks 4", "--no-gradient-accumulation-fusion"),
    (f"{EXPERTS} --usp-mlp-chunks 4", "--num-experts 2"),
    (f"{SERVED} --usp-mlp-chunks 4 --recompute-activations", "--usp-recompute"),
    (f"{SERVED} --usp-mlp-chunks 17", "16 of a sequence's 64 tokens"),
    (f"{SERVED} --usp-recompute gemm-last", "--no-bias-gelu-fusion"),
    (
        f"{SERVED} --usp-recompute gemm-last --no-bias-gelu-fusion",
        "--no-gradient-accumulation-fusion",
    ),
    (f"{CP} 4 --ulysses-degree auto --num-experts 2", "--ulysses-degree auto"),
    (f"{LOCAL} --usp-recompute attention --attention-dropout 0.1", "--attention-dropout 0"),
]
TE_CP = "--context-parallel-size 4"


@pytest.mark.parametrize(("flags", "named"), REFUSED)
def test_an_option_is_refused_before_any_group(starts, flags, named):
    answer = starts.start(flags, rank=1)
    assert named in answer.get("error", "") + answer["printed"]


REFUSED_BESIDE = [
    (f"{TE_CP} --ulysses-degree 2 --cp-comm-type p2p", {"installed": TE}, "--ulysses-degree 2"),
    (f"{TE_CP} --usp-kernel sdpa --cp-comm-type a2a", {"installed": TE}, "--usp-kernel sdpa"),
    (
        f"{TE_CP} --cp-comm-type p2p --usp-recompute attention",
        {"installed": TE},
        "--usp-recompute full",
    ),
    (
        f"{TE_CP} --cp-comm-type usp p2p --usp-recompute attention",
        {"installed": TE},
        "--cp-comm-type usp p2p",
    ),
    (f"{TE_CP} --usp-recompute gemm-last", {"installed": TE}, "--recompute-modules layernorm"),
    (f"{TE_CP} --usp-recompute full --fp8-format hybrid", {"installed": TE}, "fp8"),
    ("--context-parallel-size 2", {"installed": "2.8.0"}, "2.8.0"),
    (f"{SERVED} --yaml-cfg x", {}, "yaml"),
    (SERVED, {"settings": {"layout": "zigzag"}}, "layout"),
]


@pytest.mark.parametrize(("flags", "beside", "named"), REFUSED_BESIDE)
def test_an_option_is_refused_beside_what_is_installed_and_set(starts, flags, beside, named):
    assert named in starts.error(flags, **beside)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused without a GPU alone")
def test_a_process_that_saves_is_refused_without_gpu(starts):
    message = starts.error(
        f"{LOCAL} --async-save --use-persistent-ckpt-worker --save x --save-interval 10"
    )
    assert "--use-persistent-ckpt-worker" in message


def test_the_page_of_arguments_has_every_one_that_meets_attention(starts):
    # --help ends parse_args; a group is a title and its flags, two spaces in.
    _, *groups = re.split(r"^(\S.*):$", starts.start("--help")["printed"], flags=re.MULTILINE)
    titles = dict(zip(groups[::2], groups[1::2], strict=True))
    assert titles.keys() > APART and "unified sequence parallel" in titles
    for title in titles.keys() - APART - {"unified sequence parallel"}:
        assert not unnamed(re.findall(r"^  (--[\w-]+)", titles[title], re.MULTILINE)), title
