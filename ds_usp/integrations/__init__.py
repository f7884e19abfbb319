"""Models of other libraries over a sequence mesh, unedited.

To everything outside the model the ranks of a mesh are data-parallel replicas that were given the
same batch: they take the whole batch and return the whole batch's loss, and the mean of their
gradients is the gradient. So whatever averages gradients over replicas (DDP, FSDP2, ZeRO) is right.
"""
