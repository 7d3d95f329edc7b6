"""Generation during training: decoding under any strategy, and scores of the generated answers."""
