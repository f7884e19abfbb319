"""``--usp-projection-overlap`` trains what one rank trains, and refuses what it cannot serve."""

from argparse import Namespace

import pytest
from trainer_runs import PLAIN_SGD, degrees, relative_difference, train
from usp_trainer.validate_args import PROJECTIONS_NOT_SERVED as NOT_SERVED

import ds_usp
from megatron_patches.projection_checks import check_projections, projects_again

LIMIT = 1e-5
AGAIN = " --usp-projection-overlap recompute"
BIASES = (
    " --no-use-rotary-position-embeddings --no-swiglu --normalization layernorm"
    " --no-disable-bias-linear --num-key-value-heads 4"
)
RUNS = [
    degrees(sp=4, u=2, zero=1) + AGAIN,
    degrees(sp=4, u=4, zero=2) + AGAIN + " --usp-recompute full --usp-mlp-chunks 5",
    degrees(sp=2, u=2, pp=2, zero=1) + AGAIN + BIASES,
    degrees(sp=4, u=1, zero=3) + AGAIN,
    degrees(sp=4, u=2, zero=3) + AGAIN + " --usp-recompute full --usp-checkpoint-layers 2",
]


def test_overlapped_projections_train_what_one_rank_trains(tmp_path):
    more = PLAIN_SGD + " --global-batch-size 2"
    one, biased = train(1, degrees() + more, degrees() + more + BIASES, output_dir=tmp_path)
    runs = [run + more for run in RUNS]
    for run, numbers in zip(runs, train(4, *runs, output_dir=tmp_path), strict=True):
        expected = biased if BIASES in run else one
        assert relative_difference(numbers, expected) < LIMIT, (run, numbers, expected)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"tensor_model_parallel_size": 2}, "Use --tensor-model-parallel-size 1, or --usp-proj"),
        ({"usp_recompute": "gemm-last"}, "Use --usp-recompute full, or --usp-projection"),
        ({"transformer_impl": "transformer_engine"}, "Use --transformer-impl local, or"),
    ],
)
def test_what_cannot_be_served_is_refused(changes, fix):
    plain = {
        "usp_projection_overlap": "recompute",
        "usp_recompute": "none",
        "tensor_model_parallel_size": 1,
        "transformer_impl": "local",
        "device": "cpu",
    }
    check_projections(Namespace(**plain), NOT_SERVED)
    with pytest.raises(ds_usp.ConfigError, match=fix):
        check_projections(Namespace(**{**plain, **changes}), NOT_SERVED)
    assert projects_again(Namespace(**plain), 4) and not projects_again(Namespace(**plain), 1)
    off = Namespace(**{**plain, **changes, "usp_projection_overlap": "off"})
    check_projections(off, NOT_SERVED)
    assert not projects_again(off, 4)
