"""The layers of a hybrid model, for ``--spec lm_hybrid STACK``."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from recurrent_kernels import stack_spec

STACK = stack_spec(get_gpt_layer_local_spec())
