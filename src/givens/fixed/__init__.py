"""`fit`: a quantizer for vectors that stay as they are."""
