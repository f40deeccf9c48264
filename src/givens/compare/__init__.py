"""Every compression of vectors at equal bytes, on one's own vectors: run, rows, page."""

# First: it says what to install where Faiss is missing.
import givens.export.faiss  # noqa: F401
