"""Small Triton kernels. Importing this package imports no Triton: a machine without a GPU may not have it."""
