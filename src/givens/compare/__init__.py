"""Compare all compressions at equal bytes on your own vectors: run, rows, page."""

# First: it says what to install where Faiss is missing.
import givens.export.faiss  # noqa: F401
