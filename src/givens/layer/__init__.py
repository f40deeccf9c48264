"""`IndexLayer`: a quantizer that is trained with the model whose vectors it holds."""
