"""Run folders as one self-contained page: read, measured, drawn, written."""
