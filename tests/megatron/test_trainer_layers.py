"""The trainer's layer specs; without TransformerEngine, by layers that have its structure."""

import json
from typing import Any

from trainer_runs import PLAIN_SGD, degrees, errors, relative_difference, train
from usp_trainer.run_files import METADATA

LIMIT = 1e-5


def no_obstacle(args: Any) -> str:
    return ""


def fused_norms(*_: Any) -> tuple[Any, type]:
    """Layers whose norms are fused into linear layers, as TransformerEngine's are."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class NormLinear(ColumnParallelLinear):
        def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, *args, config=config, **kwargs)
            self.norm = WrappedTorchNorm(config, input_size, config.layernorm_epsilon)

        def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            return super().forward(self.norm(hidden), *args, **kwargs)

    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    spec.submodules.self_attention.submodules.linear_qkv = NormLinear
    spec.submodules.mlp.submodules.linear_fc1 = NormLinear
    return spec, WrappedTorchNorm


STAND_IN = {
    "usp_trainer.transformer_impl._obstacle": no_obstacle,
    "usp_trainer.model.megatron_layer": fused_norms,
}


def test_layers_with_fused_norms_train_the_same_model(tmp_path):
    (local,) = train(1, degrees() + PLAIN_SGD, output_dir=tmp_path)
    runs = [
        degrees(**grid) + PLAIN_SGD + recompute
        for grid in ({"sp": 4, "u": 2, "zero": 1}, {"sp": 2, "u": 1, "tp": 2, "zero": 1})
        for recompute in ("", " --usp-recompute gemm-last")
    ]
    for numbers in train(4, *runs, output_dir=tmp_path, patches=STAND_IN):
        assert relative_difference(numbers, local) < LIMIT


def test_a_checkpoint_names_the_layers_that_it_is_of(tmp_path):
    flags = degrees(sp=2, u=2) + PLAIN_SGD + f" --save {tmp_path / 'checkpoint'}"
    train(2, flags, output_dir=tmp_path, steps=1, save_at=0, patches=STAND_IN)
    resumed = degrees(sp=2, u=2) + PLAIN_SGD + f" --load {tmp_path / 'checkpoint'}"
    for error in errors(2, resumed, tmp_path):
        assert "transformer_impl transformer_engine in the checkpoint, local now" in str(error)
        assert str(error).endswith("Give --transformer-impl transformer_engine")
    assert errors(2, resumed, tmp_path, patches=STAND_IN) == [None, None]


def test_an_earlier_checkpoint_is_of_local_layers(tmp_path):
    folder = tmp_path / "checkpoint"
    train(1, degrees() + PLAIN_SGD + f" --save {folder}", output_dir=tmp_path, steps=1, save_at=0)
    (path,) = folder.glob(f"*/{METADATA}")
    metadata = json.loads(path.read_text())
    assert metadata["model"].pop("transformer_impl") == "local"
    del metadata["checksum"]
    path.write_text(json.dumps({**metadata, "format": 1}))
    assert errors(1, degrees() + PLAIN_SGD + f" --load {folder}", tmp_path) == [None]
