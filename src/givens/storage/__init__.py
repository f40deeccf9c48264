"""Atomic files, vectors in seven formats, and addresses."""
