"""Dropout over shards: noise of its own on each rank, the same again in backward, and streams of
random numbers that stay alike on all ranks."""

from typing import Any

import pytest
import tiny_diffusers
import torch
import torch.distributed as dist
from cases import mesh_of
from harness import RankContext
from tiny_models import build
from tiny_towers import TOWERS, batch_with_images, build_with_tower
from torch import Tensor, nn
from training_models import Batch, Model, batch_of, difference, gradients, llama

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.integrations import diffusers
from ds_usp.integrations.transformers import enable

P = 0.5
TOKENS = 41  # of which one rank has 21 and the other 20: they draw different numbers of numbers
CHECKPOINTS = {"reentrant": True, "not reentrant": False}


def lora(targets: Any = "all-linear") -> Any:
    import peft

    return peft.LoraConfig(r=4, lora_dropout=P, init_lora_weights=False, target_modules=targets)


def adapted(model: Model) -> Model:
    import peft

    torch.manual_seed(3)
    return peft.get_peft_model(model, lora()).train()


def recorded(model: Model) -> dict[str, Tensor]:
    """What each dropout multiplies its input by, of the last forward pass."""
    masks: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:

            def keep(_: nn.Module, args: Any, out: Tensor, name: str = name) -> None:
                masks[name] = (out != 0).detach() / (1 - P)

            module.register_forward_hook(keep)
    return masks


class Given(nn.Module):
    """A dropout whose mask is given."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def of_both_ranks(x: Any) -> list[Any]:
    out = [None, None]
    dist.all_gather_object(out, x)
    return out


def alike(masks: dict[str, Tensor]) -> dict[str, float]:
    """By dropout, the fraction of elements that both ranks drop or both keep."""
    first, second = of_both_ranks(masks)
    tokens = {name: min(x.shape[1], second[name].shape[1]) for name, x in first.items()}
    return {
        name: float((first[name][:, :n] == second[name][:, :n]).float().mean())
        for name, n in tokens.items()
    }


def two_passes(model: Model, batch: Batch) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Losses, gradients, and what a user draws afterwards."""
    torch.manual_seed(11)
    losses = [model(**batch).loss for _ in range(2)]
    sum(losses).backward()
    return [float(x) for x in losses], gradients(model), torch.rand(3)


class Expert(nn.Module):
    """An MLP that drops elements of the one token whose first channel is the largest."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.dropout, self.limit, self.count = mlp, nn.Dropout(P), 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        out, first = self.mlp(x), x[..., 0]
        self.limit = self.limit or float(first.flatten().topk(2).values.mean())
        own = out[first > self.limit]
        self.count = len(own)
        return out.masked_scatter(
            (first > self.limit)[..., None], self.dropout(own) if len(own) else own
        )


def streams_beside_an_expert(batch: Batch) -> float:
    """How far the ranks' generators are apart after a pass in which one rank alone has drawn."""
    model = llama().train()
    expert = model.model.layers[0].mlp = Expert(model.model.layers[0].mlp)
    model(**batch)
    with enable(model, mesh_of(2)):
        torch.manual_seed(11)
        model(**batch)
        assert sorted(of_both_ranks(expert.count)) == [0, 1]
        drawn = torch.rand(3)
    return max(float((drawn - x).abs().max()) for x in of_both_ranks(drawn))


def noise_of_a_model(ctx: RankContext) -> dict[str, float]:
    """By name what must be 0, or nearly."""
    batch, model = batch_of(TOKENS), adapted(llama())
    enabled, masks, found = enable(model, mesh_of(2)), recorded(model), {}
    torch.manual_seed(11)
    loss = model(**batch).loss
    found |= {f"alike {n}": x - P**2 - (1 - P) ** 2 for n, x in alike(masks).items()}
    # One process with the masks of both ranks, put together.
    reference = adapted(llama())
    for name, mask in masks.items():
        owner, _, child = name.rpartition(".")
        setattr(reference.get_submodule(owner), child, Given(enabled.whole(mask)))
    wanted = reference(**batch).loss
    wanted.backward()
    loss.backward()
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= 2
    found["loss"] = float((loss - wanted).detach().abs())
    found["gradients"] = difference(grads, gradients(reference))

    losses, grads, drawn = two_passes(model, batch)
    found["passes alike"] = float(losses[0] == losses[1])
    found["streams"] = max(float((drawn - x).abs().max()) for x in of_both_ranks(drawn))
    # A training that goes on from a saved random state after its first pass.
    torch.manual_seed(11)
    model(**batch)
    saved = torch.get_rng_state()
    model(**batch), torch.rand(5), torch.set_rng_state(saved)
    found["resumed"] = float(model(**batch).loss) - losses[1]
    for name, reentrant in CHECKPOINTS.items():
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        again, of_checkpoints, drawn_again = two_passes(model, batch)
        found[name] = max(float((grads[n] - x).abs().max()) for n, x in of_checkpoints.items())
        found[f"{name}, losses"] = abs(sum(again) - sum(losses))
        found[f"{name}, drawn"] = float((drawn_again - drawn).abs().max())
    with torch.no_grad():
        model.eval()
        torch.manual_seed(11)
        before = torch.get_rng_state()
        model(**batch)
        found["without dropout"] = float(not torch.equal(torch.get_rng_state(), before))
    return found | {"streams beside an expert": streams_beside_an_expert(batch)}


def test_each_rank_draws_noise_of_its_own_that_comes_again_in_backward(pool):
    for found in pool.run(noise_of_a_model, 2):
        sampled = [found.pop(name) for name in list(found) if name.startswith("alike")]
        assert len(sampled) == 21
        assert max(map(abs, sampled)) < 0.05  # 5 deviations of 2,560 elements
        assert max(found.pop("loss"), found.pop("gradients")) < 1e-5
        assert set(found.values()) == {0}, found


def noise_of_a_tower_and_of_text(ctx: RankContext) -> dict[str, float]:
    model = build_with_tower("qwen2_vl")
    batch = batch_with_images(model, TOWERS["qwen2_vl"][1]())
    model = adapted(model)
    enable(model, mesh_of(1))
    masks = recorded(model)
    torch.manual_seed(11)
    model(**batch)
    return alike(masks)


def noise_of_a_diffusion_transformer(ctx: RankContext) -> dict[str, float]:
    """Return how much of each mask is alike on both ranks, how far a checkpoint moves gradients,
    and how far the ranks' generators are apart after passes, one of them with text whose length is
    that of rank 1's shard alone."""
    transformer = tiny_diffusers.build("WanTransformer3DModel", num_layers=1)
    diffusers.enable(transformer, mesh_of(2))
    torch.manual_seed(3)
    transformer.add_adapter(lora(["to_q", "to_k", "net.2", "linear_1", "proj_out"]))
    masks = recorded(transformer.train())

    def a_pass(**changed: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        given = tiny_diffusers.arguments("WanTransformer3DModel") | changed
        torch.manual_seed(11)
        tiny_diffusers.output_of(transformer, given).square().mean().backward()
        return gradients(transformer), torch.rand(3)

    grads, drawn = a_pass()
    found = alike(masks)
    transformer.enable_gradient_checkpointing()
    again, drawn_again = a_pass()
    found["checkpoint"] = max(float((grads[n] - again[n]).abs().max()) for n in grads)
    others = [drawn_again, *of_both_ranks(drawn)]
    found["streams"] = max(float((x - drawn).abs().max()) for x in others)
    # 45 tokens of the image: 23 on one rank, 22 on the other.
    _, drawn = a_pass(encoder_hidden_states=torch.ones(2, 22, 16))
    found["streams"] += max(float((x - drawn).abs().max()) for x in of_both_ranks(drawn))
    return found | {f"{name}, as long": fraction for name, fraction in alike(masks).items()}


@pytest.mark.parametrize(
    ("noise", "of_whole", "count"),
    [
        (noise_of_a_tower_and_of_text, ("visual",), 24),
        (noise_of_a_diffusion_transformer, ("embedder", "attn2.to_k"), 16),
    ],
)
def test_noise_of_whole_tensors_is_alike_and_of_shards_not(pool, noise, of_whole, count):
    for found in pool.run(noise, 2):
        assert found.pop("checkpoint", 0) == found.pop("streams", 0) == 0
        assert len(found) == count
        for name, fraction in found.items():
            if any(part in name for part in of_whole):
                assert fraction == 1, name
            else:
                assert fraction == pytest.approx(P**2 + (1 - P) ** 2, abs=0.05), name


def leave_out_layers(ctx: RankContext) -> None:
    model = build("opt", layerdrop=0.5).train()
    with enable(model, mesh_of(1)):
        model(**batch_of(16))


def noise_of_weights(ctx: RankContext) -> dict[str, float]:
    """Adapters that draw for a weight, or by a seed, are refused in training; others with settings
    of the same names are not. By name how far losses of the latter are from one process's."""
    import peft

    refused = [
        (peft.LoHaConfig, {"module_dropout": P}),
        (peft.LoHaConfig, {"rank_dropout": P}),
        (peft.LoKrConfig, {"module_dropout": P}),
        (peft.LoKrConfig, {"rank_dropout": P}),
        (peft.BOFTConfig, {"boft_dropout": P}),
        (peft.LoraConfig, {"monteclora_config": peft.MontecloraConfig()}),
        (peft.PveraConfig, {"generator_seed": 0}),
    ]
    whole = {"init_weights": False}
    served = [
        (peft.OFTConfig, {"module_dropout": P, **whole}),
        (peft.LoHaConfig, whole),
        (peft.LoKrConfig, whole),
        (peft.BOFTConfig, whole),
    ]
    batch, found = batch_of(TOKENS), {}
    for kind, given in refused + served:
        torch.manual_seed(3)
        config = kind(target_modules=["v_proj", "down_proj"], **given)
        model = peft.get_peft_model(llama(), config).train()
        alone = None if (kind, given) in refused else float(model(**batch).loss)
        with enable(model, mesh_of(1)):
            if alone is None:
                with pytest.raises(UnsupportedAttentionError, match="'default' .*" + min(given)):
                    model(**batch)
                with model.disable_adapter():
                    model(**batch)
            else:
                found[f"{kind.__name__} {given}"] = abs(float(model(**batch).loss) / alone - 1)
    return found


def test_ranks_on_cpus_leave_out_no_layers_and_no_parts_of_weights(pool):
    for found in pool.run(noise_of_weights, 2):
        assert max(found.values()) < 1e-5, found
    for error in pool.errors(leave_out_layers, 2):
        assert type(error) is UnsupportedAttentionError
        assert "layerdrop=0.5" in str(error)
