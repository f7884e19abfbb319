"""What the columns and rows of the planner's tables mean, for the help of each command."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_MEMORY = """\
parts of a GPU's memory, at its worst moment (names in tables and in --json):
  weights, gradients, optimizer  after ZeRO has divided them
  activations  what all layers in flight keep for the backward pass, less what is offloaded
  logits       of the last stage, with the loss's fp32 copy; none where a layer's backward is worse
  exchange     send and receive buffers of one attention call (all-to-all and ring)
  transient    what lives while one layer is computed: what it computes again, weights that ZeRO-3
               gathers
  workspace    what no formula sees: libraries, fragments (fitted once to published runs)"""

_PLAN = """\
columns of the table:
  ulysses x ring  ranks that exchange heads x ranks that pass keys and values around; (ring inside):
                  neighbouring ranks are those of the ring
  tp, pp, dp      tensor, pipeline (x virtual stages) and data parallel ranks
  mb              micro batch: sequences of a replica at a time
  loss            whole: all logits are held at once; chunks: never (--usp-loss-chunks)
  recompute       what backward computes again: gemm-last: norms and activation functions;
                  attention-only: the attention core; attention: all but attention; full: all
  offload         share of the saved activations that waits in host memory
  MFU             model FLOP utilization, predicted; rows that end in = are a tie with the best:
                  closer to it than the planner's own error, 6 % from formulas and 3 % from a
                  profile with the model's layers
  step s          predicted seconds of one optimizer step
  GiB             of one GPU, at its worst moment"""

LEGENDS: Mapping[str, str] = MappingProxyType(
    {
        "memory": _MEMORY,
        "longest": f"""\
columns of the table, beside the parts of memory:
  offload    share of the saved activations that waits in host memory: as much as the longest
             sequence needs
  tokens     the longest sequence, in steps of 1024
  GPU, host  GiB of one GPU, and of its node's memory a GPU
  ends with  what is full, or divides no further, one step beyond

{_MEMORY}""",
        "plan": f"{_PLAN}\n\n{_MEMORY}",
        "table": """\
columns, on N ranks, for a block of 12 d^2 weights, activations of b s d elements:
  params d^2  sent for weights and gradients in a step, in d^2 elements; (paper): as printed there
  act b s d   sent for activations in a layer, forward and backward, in b s d elements
  relayed     the same where blocks are passed around the ring, not sent to those who need them
  P+G, 6P, A  held by a rank, as shares: weights and gradients; optimizer states; activations""",
    }
)
