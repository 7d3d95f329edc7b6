"""Classification of texts, words and images, and regression."""
