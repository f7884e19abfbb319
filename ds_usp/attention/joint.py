"""``usp_joint_attention``: a sharded sequence together with tokens replicated on every rank."""

from __future__ import annotations

import torch

from ds_usp.attention.functional import head_exchange, usp_attention
from ds_usp.attention.op_specs import graph_break
from ds_usp.attention.score_mod import NO_SCORE_MOD, Scores
from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.attention.validation import check_layout, check_on_all_ranks, token_layout
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.joint import ConcatenatedShards, JointLayout
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.kernels.registry import AUTO

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@graph_break
def usp_joint_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    joint_q: torch.Tensor,
    joint_k: torch.Tensor,
    joint_v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    mask: MaskSpec,
    joint_front: bool = True,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    kernel: str = AUTO,
    tuning: Tuning = AUTO_TUNING,
    scores: Scores = NO_SCORE_MOD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`usp_attention` over a sharded sequence and replicated tokens, as one sequence.

    As in diffusion transformers, where an image is sharded over the ranks and its text is not. Each
    rank joins its shard of the joint tokens to its shard of the sequence, so they are computed
    once, evenly; at the end the joint tokens' outputs are all-gathered. Collective over the mesh.

    Beside the attention of all tokens it costs one all-gather of ``joint_out`` forward and the
    same bytes backward; and with Ulysses ranks the head exchange is packed run by run and sent by
    NCCL/gloo P2P.

    Shapes:
        q ``[b, s_local, h, d]``, k ``[b, s_local, h_kv, d]``, v ``[b, s_local, h_kv, e]``, joint_q,
        joint_k, joint_v alike with ``[b, joint]`` tokens, the same values on every rank -> out
        ``[b, s_local, h, e]`` and joint_out ``[b, joint, h, e]``, the same on every rank.

    Gradients of the joint tensors are local to each rank: their sum over the ranks of the mesh is
    the gradient, as it is for the weights that made them; gradients of joint_out are summed
    likewise. So the all-reduce that sums the gradients of other weights is right for layers that
    every rank computes on the joint tokens, too.

    Args:
        layout: of the sequence without the joint tokens, which are laid out by the same kind.
        mask: over all tokens, in positions of the joined sequence.
        joint_front: joint tokens come first, else last.

    The other arguments and errors are those of :func:`usp_attention`.

    Raises:
        LayoutError: fewer joint tokens than ranks.
    """

    def check() -> tuple[str, JointLayout]:
        """Check the call on this rank; returns its signature, compared on all ranks, and the layout
        of the joined sequence.
        """
        joint = _validate((q, k, v), (joint_q, joint_k, joint_v))
        main = token_layout(layout, q, mesh)
        check_layout(q, "queries", mesh, main)
        if not isinstance(joint_front, bool):
            raise ConfigError(f"joint_front={joint_front!r} must be True or False")
        combined = JointLayout.of(main, joint, joint_front)
        return f"{combined}, {combined.layouts[0]}", combined

    combined = check_on_all_ranks(mesh, check, q, layout)
    call = mesh.consistency.number
    joint_layout = combined.layouts[0]
    pieces = [
        (joint_layout.shard(joint_x, 1, mesh.rank), x)
        for joint_x, x in ((joint_q, q), (joint_k, k), (joint_v, v))
    ]
    joined = [torch.cat(pair if joint_front else pair[::-1], dim=1) for pair in pieces]
    out = usp_attention(
        joined[0],
        joined[1],
        joined[2],
        mesh=mesh,
        layout=combined,
        mask=mask,
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        kernel=kernel,
        tuning=tuning,
        scores=scores,
    )
    lengths = [pair.shape[1] for pair in (pieces[0] if joint_front else pieces[0][::-1])]
    outs = out.split(lengths, dim=1)
    joint_out, main = outs if joint_front else outs[::-1]
    every_head = ((0, out.shape[2]),) * mesh.sp_degree
    gather = HeadAllToAll(mesh.flat(), (ConcatenatedShards.of(joint_layout),), (every_head,))
    (joint_shards,) = head_exchange(gather, True, call, joint_out)
    lengths = [joint_layout.length(rank) for rank in range(mesh.sp_degree)]
    return main, joint_layout.gather(joint_shards.split(lengths, dim=1), 1)


def _validate(main: QKV, joint: QKV) -> int:
    """Check that joint tensors fit q, k and v; returns their number of tokens.

    Raises:
        ConfigError: they do not.
    """
    tokens = {x.shape[1] for x in joint if x.ndim == 4}
    fits = all(
        x.ndim == y.ndim == 4
        and (x.shape[0], *x.shape[2:], x.dtype, x.device)
        == (y.shape[0], *y.shape[2:], y.dtype, y.device)
        for x, y in zip(main, joint, strict=True)
    )
    if not fits or len(tokens) != 1:
        shown = "; ".join(
            f"{name} {list(x.shape)}, joint_{name} {list(y.shape)}"
            for name, x, y in zip("qkv", main, joint, strict=True)
        )
        raise ConfigError(
            "joint tensors must share everything but the tokens with q, k and v, dtype and device "
            f"too, and be as long as each other: {shown}"
        )
    return tokens.pop()
