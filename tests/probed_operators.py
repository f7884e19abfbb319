"""Imported by the server of ranks alone: when DeepSpeed is first asked which of its operators could
be built here, it compiles and links a program."""

import deepspeed

COMPATIBLE = deepspeed.ops.__compatible_ops__
