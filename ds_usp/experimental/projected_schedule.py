"""The schedule of an attention call that projects its own heads, and again in backward.

The instructions of plain attention (``ds_usp.geometry.pipeline_schedule``) keep their order. A
chunk's rows of the weights are multiplied just before its post, under the exchange of the chunk
before:

- forward: queries, keys and values; after all chunks the output.
- backward: they are projected and posted again, then the gradient of the attention output, with
  the output itself. The gradient of the output's weight is computed under the first exchange, those
  of a chunk's rows when it returns, the input's at the end.

Source: Untied Ulysses (arXiv 2602.21196).
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_usp.geometry.pipeline_schedule import Instr, Op, Operation, Schedule


class ProjectedOp(Operation):
    """The operations beside those of attention."""

    PROJECT = "mmqkv"  # the chunk's queries, keys and values
    PROJECT_OUT = "mmout"  # all of the output
    # What backward has projected again, to heads; the gradient of the output follows it.
    AGAIN_POST, AGAIN_WAIT = ("first", "all_to_all"), ("first?", "all_to_all")
    GRAD_OUT = "mmdout"  # the gradient of the chunk's attention output
    GRAD_OUT_WEIGHT = "mmwout"  # the gradient of the output's weight
    GRAD_WEIGHT = "mmwqkv"  # of the chunk's rows
    GRAD_INPUT = "mmdx"  # the gradient of the input


def projected_forward(attention: Schedule) -> Schedule:
    """A forward pass with its products."""
    instrs: list[Instr] = []
    for instr in attention:
        if instr.op in (Op.A2A_POST, Op.SLICE_HEADS):
            instrs.append(Instr(ProjectedOp.PROJECT, instr.chunk))
        instrs.append(instr)
    return *instrs, Instr(ProjectedOp.PROJECT_OUT, attention[-1].chunk)


def projected_backward(attention: Schedule) -> Schedule:
    """A backward pass with its products.

    Args:
        attention: the pass without them, which exchanges keys and values again
            (``pipeline_schedule(..., kv_saved=False)``).
    """
    return tuple(_backward(attention))


def _backward(attention: Schedule) -> Iterator[Instr]:
    begun = False
    for instr in attention:
        op, chunk = instr.op, instr.chunk
        if op is Op.A2A_POST:
            yield Instr(ProjectedOp.PROJECT, chunk)
            yield Instr(ProjectedOp.AGAIN_POST, chunk)
            yield Instr(ProjectedOp.GRAD_OUT, chunk)
        elif op is Op.SLICE_HEADS:
            yield Instr(ProjectedOp.PROJECT, chunk)
            yield Instr(ProjectedOp.GRAD_OUT, chunk)
        if op in (Op.A2A_WAIT, Op.SLICE_HEADS) and not begun:
            begun = True
            yield Instr(ProjectedOp.GRAD_OUT_WEIGHT, chunk)
        if op is Op.A2A_WAIT:
            yield Instr(ProjectedOp.AGAIN_WAIT, chunk)
        yield instr
        if op in (Op.RETURN_WAIT, Op.STORE):
            yield Instr(ProjectedOp.GRAD_WEIGHT, chunk)
            if not chunk:
                yield Instr(ProjectedOp.GRAD_INPUT, chunk)
