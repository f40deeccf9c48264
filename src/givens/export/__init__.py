"""Indexes for other programs to serve; each file imports one package, when it is imported."""
