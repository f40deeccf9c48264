"""Indexes for other programs to serve; each file imports one package, when it is imported."""

# Lists of an inverted file that a search looks into unless it is told otherwise.
NPROBE = 16
