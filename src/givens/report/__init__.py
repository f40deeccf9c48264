"""Training runs as one self-contained page: read, measure, draw, write."""
