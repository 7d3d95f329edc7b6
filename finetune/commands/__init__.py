"""What every command but `train` does; each module is named as the word that users type."""
