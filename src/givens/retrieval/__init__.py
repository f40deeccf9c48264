"""Two towers and an index, trained together: data, towers, losses, training, evaluation."""
