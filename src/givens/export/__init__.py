"""Indexes for other programs; each module imports the package that it is for."""

# The default nprobe.
NPROBE = 16
