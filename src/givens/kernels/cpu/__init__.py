"""The hot loops for a CPU, compiled by numba."""
