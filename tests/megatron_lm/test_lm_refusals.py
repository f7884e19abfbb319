"""What cannot be trained exactly in Megatron-LM is refused on every rank, before a group exists."""

from __future__ import annotations

import pytest
import torch
from lm_start import LOCAL, Starts

CP4 = f"{LOCAL} --context-parallel-size 4 --ulysses-degree 2"
TE = "2.20.2"
AGAIN, UNFUSED = "--usp-projection-overlap recompute", "--no-gradient-accumulation-fusion"
FSDP = "--use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dist"
NOT_OVERLAPPED = [
    ("", "Add --no-gradient-accumulation-fusion, or --usp-projection-overlap off"),
    (f"{UNFUSED} --tensor-model-parallel-size 2", "--tensor-model-parallel-size is 2. Use"),
    (f"{UNFUSED} --qk-layernorm", "--qk-layernorm and --qk-l2-norm normalize queries and keys"),
    (f"{UNFUSED} --attention-output-gate", "--attention-output-gate"),
    (
        f"{UNFUSED} --no-rope-freq 2 --position-embedding-type rope",
        "--no-rope-freq. Leave them out",
    ),
    (f"{UNFUSED} --multi-latent-attention --position-embedding-type rope", "several products"),
    (
        f"{UNFUSED} --no-bias-gelu-fusion --usp-recompute gemm-last",
        "both replace the projections. Use --usp-recompute full, or",
    ),
    (f"{UNFUSED} --usp-recompute attention", "saves the results of attention without its"),
    (f"{UNFUSED} --recompute-activations", "Use --recompute-granularity full or --usp-recompute"),
    (f"{UNFUSED} --fp8-format hybrid", "in their own dtype, not in fp8 or fp4"),
    (f"{UNFUSED} {FSDP}", "--use-torch-fsdp2 and --use-megatron-fsdp gather weights by hooks"),
]
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
    (f"{CP4} --cp-comm-type p2p", "p2p is TransformerEngine's context parallelism, and"),
    (f"{CP4} --cp-comm-type usp usp usp", "has 3 entries, and the model 2 layers"),
    (f"{CP4} --cp-comm-type allgather", "--cp-comm-type allgather is unknown; there are usp, p2p"),
    (
        f"{CP4} --hierarchical-context-parallel-sizes 4 1",
        "--hierarchical-context-parallel-sizes=[4, 1] is not ulysses x ring = [2, 2] "
        "(--context-parallel-size=4, --ulysses-degree=2)",
    ),
    (f"{CP4} --usp-cluster h100", "--usp-cluster h100 is for --ulysses-degree auto"),
    (f"{CP4} --attention-dropout 0.1", "Set --attention-dropout 0"),
    (f"{CP4} --position-embedding-type relative", "position embeddings"),
    (
        f"{CP4} --multi-latent-attention --position-embedding-type rope "
        "--tensor-model-parallel-size 2",
        "Megatron-LM does not add up the gradients",
    ),
    (f"{CP4} --attention-backend flash", "--attention-backend flash chooses among the kernels"),
    (f"{CP4} --reset-attention-mask", "--reset-attention-mask makes a dense mask"),
    (f"{CP4} --batch-invariant-mode", "Leave it out"),
    (f"{CP4} --hybrid-context-parallel --calculate-per-token-loss", "--hybrid-context-parallel"),
    (f"{CP4} --hybrid-attention-ratio 0.5", "Mamba layers share a sequence"),
    (f"{CP4} --is-hybrid-model", "Mamba layers share a sequence"),
    (f"{CP4} --sft --tensor-model-parallel-size 2", "Use --tensor-model-parallel-size 1"),
    (
        f"{CP4} --position-embedding-type mrope --mrope-section 2 1 1",
        "mrope needs positions in three axes",
    ),
    (
        f"{CP4} --window-size 8,4",
        "Use a window whose second number is 0, such as --window-size 8,0",
    ),
    (
        f"{CP4} --num-experts 2 --moe-aux-loss-coeff 0.1 --calculate-per-token-loss",
        "Leave --calculate-per-token-loss out",
    ),
    (
        f"{CP4} --num-experts 2 --moe-z-loss-coeff 0.1 --calculate-per-token-loss",
        "Leave --calculate-per-token-loss out",
    ),
    (
        f"{CP4} --sft --pipeline-model-parallel-size 2",
        "gives the documents to the first and the last stage alone",
    ),
    (
        f"{CP4} --mtp-num-layers 1 --position-embedding-type rope --cp-comm-type usp usp",
        "--cp-comm-type with one entry a layer has none for --mtp-num-layers 1",
    ),
    (f"{CP4} --cuda-graph-impl local", "--cuda-graph-impl local captures layers"),
    (f"{CP4} --cpu-offloading-num-layers 1", "offloading of activations hooks into"),
    (f"{CP4} --overlap-moe-expert-parallel-comm", "the layers of two micro batches in turns"),
    (f"{CP4} --fake-process-group", "--fake-process-group skips all communication"),
    (f"{CP4} --experimental-attention-variant dsa", "--experimental-attention-variant dsa"),
    (f"{CP4} --use-legacy-models --ckpt-format torch", "not supported in legacy models"),
    (f"{CP4} --transformer-impl inference_optimized", "is for inference"),
    (f"{CP4} --seq-length 60", "seq-length should be a multiple of 2 * context-parallel-size"),
    ("", "needs TransformerEngine 2.9.0a0 or newer, which is not installed"),
    (f"{CP4} --usp-recompute full --recompute-activations", "recompute the same"),
    (f"{CP4} --usp-mlp-chunks 4", "Add --no-gradient-accumulation-fusion"),
    (f"{CP4} --usp-mlp-chunks 4 --num-experts 2", "--num-experts 2 asks for experts"),
    (f"{CP4} --usp-mlp-chunks 4 --recompute-activations", "Use --usp-recompute instead"),
    (f"{CP4} --usp-mlp-chunks 17", "a rank has 16 of a sequence's 64 tokens; use 0 to 16 chunks"),
    (f"{CP4} --usp-recompute gemm-last", "Add --no-bias-swiglu-fusion --no-bias-gelu-fusion"),
    (
        f"{CP4} --usp-recompute gemm-last --no-bias-gelu-fusion",
        "Add --no-gradient-accumulation-fusion",
    ),
    (
        f"{LOCAL} --context-parallel-size 4 --ulysses-degree auto --num-experts 2",
        "--ulysses-degree auto: the planner knows dense models",
    ),
    (f"{LOCAL} --usp-recompute attention --attention-dropout 0.1", "Set --attention-dropout 0"),
    *((f"{CP4} {AGAIN} {flags}", message) for flags, message in NOT_OVERLAPPED),
    (f"{CP4} {AGAIN} {UNFUSED} --qk-l2-norm", "between their"),
]
REFUSED_WITH_TRANSFORMER_ENGINE = [
    (
        f"--context-parallel-size 4 {AGAIN} {UNFUSED}",
        "--usp-projection-overlap recompute multiplies weights of Megatron-LM's own linear layers, "
        "and --transformer-impl is transformer_engine. Use --transformer-impl local, or",
    ),
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
def test_an_option_is_refused_before_any_group(starts: Starts, flags: str, message: str) -> None:
    answer = starts.start(flags, rank=1)
    assert message in answer.get("error", "") + answer["printed"]


@pytest.mark.parametrize(("flags", "message"), REFUSED_WITH_TRANSFORMER_ENGINE)
def test_an_option_is_refused_beside_transformer_engine(
    starts: Starts, flags: str, message: str
) -> None:
    assert message in starts.error(flags, installed=TE)


def test_an_old_transformer_engine_is_refused(starts: Starts) -> None:
    message = starts.error("--context-parallel-size 2", installed="2.8.0")
    assert "needs TransformerEngine 2.9.0a0 or newer, which is 2.8.0" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused without a GPU alone")
def test_a_process_that_saves_is_refused_without_gpu(starts: Starts) -> None:
    message = starts.error(
        f"{LOCAL} --async-save --use-persistent-ckpt-worker --save x --save-interval 10"
    )
    assert "--use-persistent-ckpt-worker" in message


def test_a_file_of_flags_is_refused(starts: Starts) -> None:
    assert "yaml" in starts.error(f"{CP4} --yaml-cfg x")


def test_another_layout_is_refused(starts: Starts) -> None:
    assert "Leave layout out" in starts.error(CP4, settings={"layout": "zigzag"})
