"""Models of other libraries over a sequence mesh, unedited.

To everything outside the model the ranks of a mesh are data-parallel replicas that were given the
same batch (``replicas.py``): what averages gradients over replicas (DDP, FSDP2, ZeRO) is right.
"""
