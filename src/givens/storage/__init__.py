"""Atomic files, vectors in eight formats, the forms that callers have them in, and addresses."""
