"""Import layer 2: one attention call over a mesh, from geometry, kernels and comm."""
