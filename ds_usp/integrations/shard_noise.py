"""Dropout and other noise of one rank's tokens, where the ranks of a mesh have one seed, as a
Trainer's. Hooks of enabled models call it in each pass; nothing communicates."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Generator, Tensor

from ds_usp.errors import UnsupportedAttentionError


class ShardNoise:
    """Gives a part of a forward pass, which computes with a shard, random numbers of its own.

    Between :meth:`begin` and :meth:`end` the generator is seeded by the state that it has on all
    ranks, and by the rank. Afterwards it goes on where it was, one number further if the part may
    have drawn any: the ranks are in one state again, and the next part draws other numbers.

    Args:
        rank: of the mesh, whose tokens the part computes with.
    """

    # Note [the generator of tokens]
    # It is that of the tokens' device, and no other. What is drawn for all tokens at once, as which
    # layers are left out (OPT's layerdrop, module_dropout of LoHa) or blocks of a weight (BOFT), is
    # drawn on the CPU, which has to stay equal on all ranks. Models on a CPU have one generator
    # for both, and these are refused. A CUDA generator's state is two numbers on the host: nothing
    # waits for the GPU. Nothing is counted here: a state that a checkpoint of activations, or of a
    # training, has saved draws the same numbers again.
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._states: tuple[Generator, Tensor, Tensor] | None = None
        self._draws = False

    def begin(self, device: torch.device, *, draws: bool, is_shard: bool = True) -> None:
        """Seed the generator of a device, a CPU or a GPU; nothing for ``meta``.

        Args:
            draws: whether some rank draws in the part, equal on all: then each rank's state goes on
                by one number, also where an expert has no tokens. False: if this rank has drawn.
            is_shard: seed by the rank; False: equally on all ranks, for a part with whole tensors.
        """
        self.end()  # of a pass that Ctrl-C has ended: its state is this rank's alone
        generator = torch.default_generator
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedAttentionError(
                    "a CUDA graph is being captured, and each rank would draw noise of its own in "
                    "it: call eval() on the model, or capture nothing"
                )
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        elif device.type != "cpu":
            return
        before = generator.get_state()
        owner = self._rank.to_bytes(4, "big") if is_shard else b"all"
        text = before.numpy().tobytes() + owner
        generator.manual_seed(int.from_bytes(blake2b(text, digest_size=7).digest(), "big"))
        self._states, self._draws = (generator, before, generator.get_state()), draws

    def end(self) -> None:
        """Go on as before :meth:`begin`; nothing if it was not called, or has ended."""
        if self._states is None:
            return
        (generator, before, seeded), self._states = self._states, None
        draws = self._draws or not torch.equal(generator.get_state(), seeded)
        generator.set_state(before)
        if draws:
            torch.rand((), generator=generator, device=generator.device)
