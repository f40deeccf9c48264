"""Every compression of vectors at equal bytes, on one's own vectors: run, rows, page."""
