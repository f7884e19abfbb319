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
from lm_start import LOCAL

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


PACKED = """
import sys
from pathlib import Path
import torch
import megatron_patches
from ds_usp.errors import LayoutError
megatron_patches.prepare("megatron_lm", Path(sys.argv[1]))
megatron_patches.apply("megatron_lm")
import megatron.training
from types import SimpleNamespace
megatron.training.get_args = lambda: SimpleNamespace(
    context_parallel_size=2, cp_comm_type=["usp"], usp_recompute="none"
)
from megatron.core.utils import get_thd_batch_on_this_cp_rank
offsets, longest = torch.tensor([[0, 8, 12]], dtype=torch.int32), torch.tensor([8])
for rank in range(2):
    batch = {"tokens": torch.arange(12)[None], "attention_mask": None}
    batch, params = get_thd_batch_on_this_cp_rank(batch, offsets, None, longest, 2, rank)
    print(*batch["tokens"][0].tolist(), *params.cu_seqlens_q_padded.tolist())
try:
    offsets[0, 1] = 7
    batch = {"tokens": torch.arange(12)[None]}
    get_thd_batch_on_this_cp_rank(batch, offsets, None, longest, 2, rank)
except LayoutError as error:
    print(error)
"""


def test_every_packed_document_is_sharded_for_itself(checkout):
    """As --sft gives them: offsets [1, n], without padded ones; no TransformerEngine."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PACKED, str(checkout)],
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, refused = ran.stdout.splitlines()[-3:]
    assert first == "0 1 6 7 8 11 0 8 12"
    assert second == "2 3 4 5 9 10 0 8 12"
    assert "document" in refused and "7" in refused


REFUSED_CP4 = f"{LOCAL} --context-parallel-size 4 --ulysses-degree 2"
REFUSED = [
    (f"{LOCAL} --ulysses-degree 2", "--ulysses-degree 2 does not divide --context-parallel-size 1"),
    (
        f"{LOCAL} --context-parallel-size 4 --ulysses-degree 3",
        "--ulysses-degree 3 does not divide --context-parallel-size 4. Use one of 4 (ring 1)",
    ),
    (
        f"{LOCAL} --context-parallel-size 8 --tensor-model-parallel-size 2 --world-size 16",
        "unrecognized arguments",
    ),
    (
        f"{LOCAL} --context-parallel-size 4 --tensor-model-parallel-size 4",
        "--ulysses-degree 4 needs at least 4 query heads on each tensor-parallel rank, there are 2",
    ),
    (f"{REFUSED_CP4} --cp-comm-type p2p", "p2p is TransformerEngine's context parallelism, and"),
    (f"{REFUSED_CP4} --cp-comm-type usp usp usp", "has 3 entries, and the model 2 layers"),
    (
        f"{REFUSED_CP4} --cp-comm-type allgather",
        "--cp-comm-type allgather is unknown; there are usp, p2p",
    ),
    (
        f"{REFUSED_CP4} --hierarchical-context-parallel-sizes 4 1",
        "--hierarchical-context-parallel-sizes=[4, 1] is not ulysses x ring = [2, 2] "
        "(--context-parallel-size=4, --ulysses-degree=2)",
    ),
    (f"{REFUSED_CP4} --usp-cluster h100", "--usp-cluster h100 is for --ulysses-degree auto"),
    (f"{REFUSED_CP4} --attention-dropout 0.1", "Set --attention-dropout 0"),
    (f"{REFUSED_CP4} --position-embedding-type relative", "position embeddings"),
    (
        f"{REFUSED_CP4} --multi-latent-attention --position-embedding-type rope "
        "--tensor-model-parallel-size 2",
        "Megatron-LM does not add up the gradients",
    ),
    (
        f"{REFUSED_CP4} --attention-backend flash",
        "--attention-backend flash chooses among the kernels",
    ),
    (f"{REFUSED_CP4} --reset-attention-mask", "--reset-attention-mask makes a dense mask"),
    (f"{REFUSED_CP4} --batch-invariant-mode", "Leave it out"),
    (
        f"{REFUSED_CP4} --hybrid-context-parallel --calculate-per-token-loss",
        "--hybrid-context-parallel",
    ),
    (
        f"{LOCAL} --context-parallel-size 4 --ulysses-degree auto --hybrid-attention-ratio 0.5",
        "the planner does not know Megatron-LM's Mamba layers",
    ),
    (
        f"{REFUSED_CP4} --usp-mlp-chunks 4 --is-hybrid-model",
        "the layers of a hybrid model have attention, a Mamba mixer or an MLP each",
    ),
    (
        f"{REFUSED_CP4} --usp-recompute gemm-last --hybrid-override-pattern M*",
        "not Mamba layers and not gated delta nets. Use --usp-recompute attention",
    ),
    (f"{REFUSED_CP4} --sft --tensor-model-parallel-size 2", "Use --tensor-model-parallel-size 1"),
    (
        f"{REFUSED_CP4} --position-embedding-type mrope --mrope-section 2 1 1",
        "mrope needs positions in three axes",
    ),
    (
        f"{REFUSED_CP4} --window-size 8,4",
        "Use a window whose second number is 0, such as --window-size 8,0",
    ),
    (
        f"{REFUSED_CP4} --num-experts 2 --moe-aux-loss-coeff 0.1 --calculate-per-token-loss",
        "Leave --calculate-per-token-loss out",
    ),
    (
        f"{REFUSED_CP4} --num-experts 2 --moe-z-loss-coeff 0.1 --calculate-per-token-loss",
        "Leave --calculate-per-token-loss out",
    ),
    (
        f"{REFUSED_CP4} --num-experts 2 --moe-expert-capacity-factor 1",
        "--moe-expert-capacity-factor 1.0 lets each rank drop tokens by what its own shard",
    ),
    (
        f"{REFUSED_CP4} --num-experts 2 --moe-router-load-balancing-type sinkhorn",
        "Use aux_loss, seq_aux_loss, global_aux_loss or none",
    ),
    (
        f"{REFUSED_CP4} --sft --pipeline-model-parallel-size 2",
        "gives the documents to the first and the last stage alone",
    ),
    (
        f"{REFUSED_CP4} --mtp-num-layers 1 --position-embedding-type rope --cp-comm-type usp usp",
        "--cp-comm-type with one entry a layer has none for --mtp-num-layers 1",
    ),
    (f"{REFUSED_CP4} --cuda-graph-impl local", "--cuda-graph-impl local captures layers"),
    (f"{REFUSED_CP4} --cpu-offloading-num-layers 1", "offloading of activations hooks into"),
    (
        f"{REFUSED_CP4} --overlap-moe-expert-parallel-comm",
        "the layers of two micro batches in turns",
    ),
    (f"{REFUSED_CP4} --fake-process-group", "--fake-process-group skips all communication"),
    (f"{REFUSED_CP4} --experimental-attention-variant dsa", "--experimental-attention-variant dsa"),
    (f"{REFUSED_CP4} --use-legacy-models --ckpt-format torch", "not supported in legacy models"),
    (f"{REFUSED_CP4} --transformer-impl inference_optimized", "is for inference"),
    (
        f"{REFUSED_CP4} --seq-length 60",
        "seq-length should be a multiple of 2 * context-parallel-size",
    ),
    ("", "needs TransformerEngine 2.9.0a0 or newer, which is not installed"),
    (f"{REFUSED_CP4} --usp-recompute full --recompute-activations", "recompute the same"),
    (f"{REFUSED_CP4} --usp-mlp-chunks 4", "Add --no-gradient-accumulation-fusion"),
    (f"{REFUSED_CP4} --usp-mlp-chunks 4 --num-experts 2", "--num-experts 2 asks for experts"),
    (f"{REFUSED_CP4} --usp-mlp-chunks 4 --recompute-activations", "Use --usp-recompute instead"),
    (
        f"{REFUSED_CP4} --usp-mlp-chunks 17",
        "a rank has 16 of a sequence's 64 tokens; use 0 to 16 chunks",
    ),
    (
        f"{REFUSED_CP4} --usp-recompute gemm-last",
        "Add --no-bias-swiglu-fusion --no-bias-gelu-fusion",
    ),
    (
        f"{REFUSED_CP4} --usp-recompute gemm-last --no-bias-gelu-fusion",
        "Add --no-gradient-accumulation-fusion",
    ),
    (
        f"{LOCAL} --context-parallel-size 4 --ulysses-degree auto --num-experts 2",
        "--ulysses-degree auto: the planner knows dense models",
    ),
    (f"{LOCAL} --usp-recompute attention --attention-dropout 0.1", "Set --attention-dropout 0"),
]
REFUSED_WITH_TRANSFORMER_ENGINE = [
    (
        "--context-parallel-size 4 --ulysses-degree 2 --cp-comm-type p2p",
        "--cp-comm-type p2p is TransformerEngine's own context parallelism, and --ulysses-degree 2 "
        "is for USP. Leave --cp-comm-type out, or set it to usp, or leave --ulysses-degree out",
    ),
    (
        "--context-parallel-size 4 --usp-kernel sdpa --cp-comm-type a2a",
        "--usp-kernel sdpa is for USP",
    ),
    (
        "--context-parallel-size 4 --cp-comm-type p2p --usp-recompute attention",
        "--cp-comm-type p2p gives layers TransformerEngine's. Use --usp-recompute full",
    ),
    (
        "--context-parallel-size 4 --cp-comm-type usp p2p --usp-recompute attention",
        "--cp-comm-type usp p2p gives layers TransformerEngine's",
    ),
    (
        "--context-parallel-size 4 --usp-recompute gemm-last",
        "Use --recompute-granularity selective --recompute-modules layernorm",
    ),
    (
        "--context-parallel-size 4 --usp-recompute full --fp8-format hybrid",
        "layers in fp8 or fp4 have a checkpoint of their own",
    ),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_an_option_is_refused_before_any_group(starts, flags, message):
    answer = starts.start(flags, rank=1)
    assert message in answer.get("error", "") + answer["printed"]


REFUSED_BESIDE = [
    *((flags, {"installed": TE}, message) for flags, message in REFUSED_WITH_TRANSFORMER_ENGINE),
    (
        "--context-parallel-size 2",
        {"installed": "2.8.0"},
        "needs TransformerEngine 2.9.0a0 or newer, which is 2.8.0",
    ),
    (f"{REFUSED_CP4} --yaml-cfg x", {}, "yaml"),
    (REFUSED_CP4, {"settings": {"layout": "zigzag"}}, "Leave layout out"),
]


@pytest.mark.parametrize(("flags", "beside", "message"), REFUSED_BESIDE)
def test_an_option_is_refused_beside_what_is_installed_and_set(starts, flags, beside, message):
    assert message in starts.error(flags, **beside)


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
