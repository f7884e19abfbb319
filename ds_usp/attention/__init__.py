"""Floor 2: joins geometry, kernels and comm to one attention call."""
