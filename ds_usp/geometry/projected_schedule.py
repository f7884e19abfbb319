"""The schedule of an attention call with its projections: products beside exchanges, as a value.

The instructions of plain attention (:func:`pipeline_schedule`) keep their order. A product is put
before the post of what it produces, or under an exchange that it does not depend on:

- forward, several chunks: a chunk's rows of the weights before its post, so that they are
  multiplied under the exchange of the chunk before. One chunk: K and V, their post, then Q and its
  post. Without Ulysses: K and V, their first ring exchange, then Q. After all the output's product.
- backward: the gradient of the attention output before the first post, that of the output's weight
  under the first exchange. Under the last return the gradients of the weights' rows of all chunks
  that are there; then those of the last chunk, and the input's gradient. One chunk returns the
  gradients of Q first, whose rows are done under K's and V's.
- backward that keeps the input only: every chunk is projected and posted again; its rows are done
  when it returns, the input's gradient at the end.

``ds_usp.attention.projected_forward`` and ``projected_backward`` execute it; the planner prices it.

Source: the order K, V, Q of Yuan et al. (ATC 24); Untied Ulysses (arXiv 2602.21196).
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_usp.geometry.pipeline_schedule import Instr, Op, Schedule

PRODUCTS = frozenset(op for op in Op if op.value.startswith("mm"))


def projected_schedule(
    attention: Schedule, *, backward: bool, keeps_input: bool = False
) -> Schedule:
    """One pass with its products.

    Args:
        attention: the pass without them; with ``keeps_input`` a backward pass that exchanges keys
            and values again (``kv_saved=False``).
        keeps_input: backward projects again.
    """
    if not backward:
        return tuple(_forward(attention))
    return tuple(_projecting_again(attention) if keeps_input else _backward(attention))


def _num_chunks(schedule: Schedule) -> int:
    return 1 + max(instr.chunk for instr in schedule)


def _forward(attention: Schedule) -> Iterator[Instr]:
    one, without_queries = _num_chunks(attention) == 1, set[int]()
    for instr in attention:
        op, chunk = instr.op, instr.chunk
        if op is Op.A2A_POST and one:
            yield from _all((Op.PROJECT_KV, Op.A2A_FIRST_POST, Op.PROJECT_Q), chunk)
        elif op is Op.A2A_POST:
            yield Instr(Op.PROJECT, chunk)
        elif op is Op.A2A_WAIT and one:
            yield Instr(Op.A2A_FIRST_WAIT, chunk)
        elif op is Op.SLICE_HEADS:
            yield Instr(Op.PROJECT_KV, chunk)
            without_queries.add(chunk)
        elif op in (Op.ATTN, Op.END) and chunk in without_queries:
            yield Instr(Op.PROJECT_Q, chunk)
            without_queries.remove(chunk)
        yield instr
        if op is Op.KV_POST and chunk in without_queries:
            yield Instr(Op.PROJECT_Q, chunk)
            without_queries.remove(chunk)
    yield Instr(Op.PROJECT_OUT, attention[-1].chunk)


def _backward(attention: Schedule) -> Iterator[Instr]:
    rest = (Op.GRAD_WEIGHT_REST,) if _num_chunks(attention) > 1 else ()
    staged = any(instr.op is Op.RETURN_STAGE for instr in attention)
    in_two = not rest and not staged
    begun, waited = False, False
    for instr in attention:
        op, chunk = instr.op, instr.chunk
        if op in (Op.A2A_POST, Op.SLICE_HEADS) and not begun:
            begun = True
            yield Instr(Op.GRAD_OUT, chunk)
        if op in (Op.A2A_WAIT, Op.SLICE_HEADS) and not waited:
            waited = True
            yield Instr(Op.GRAD_OUT_WEIGHT, chunk)
        if op is Op.RETURN_POST and in_two:
            yield Instr(Op.RETURN_FIRST_POST, chunk)
        if op is Op.RETURN_WAIT and not chunk:
            first = (Op.RETURN_FIRST_WAIT, Op.GRAD_WEIGHT_Q) if in_two else ()
            yield from _all((*rest, *first), chunk)
        yield instr
        if chunk:
            continue
        if op is Op.RETURN_WAIT:
            last = Op.GRAD_WEIGHT_KV if in_two else Op.GRAD_WEIGHT
            yield from _all((last, Op.GRAD_INPUT), chunk)
        elif op is Op.END and not any(x.op is Op.RETURN_POST for x in attention):
            yield from _all((Op.GRAD_WEIGHT_Q, *rest), chunk)
        elif op is Op.STORE:
            yield from _all((Op.GRAD_WEIGHT_KV, Op.GRAD_INPUT), chunk)


def _projecting_again(attention: Schedule) -> Iterator[Instr]:
    waited = False
    for instr in attention:
        op, chunk = instr.op, instr.chunk
        if op is Op.A2A_POST:
            yield from _all((Op.PROJECT, Op.A2A_FIRST_POST, Op.GRAD_OUT), chunk)
        elif op is Op.SLICE_HEADS:
            yield from _all((Op.PROJECT, Op.GRAD_OUT), chunk)
        if op in (Op.A2A_WAIT, Op.SLICE_HEADS) and not waited:
            waited = True
            yield Instr(Op.GRAD_OUT_WEIGHT, chunk)
        if op is Op.A2A_WAIT:
            yield Instr(Op.A2A_FIRST_WAIT, chunk)
        yield instr
        if op in (Op.RETURN_WAIT, Op.STORE):
            yield Instr(Op.GRAD_WEIGHT, chunk)
            if not chunk:
                yield Instr(Op.GRAD_INPUT, chunk)


def _all(ops: tuple[Op, ...], chunk: int) -> Iterator[Instr]:
    return (Instr(op, chunk) for op in ops)
