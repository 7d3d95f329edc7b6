"""Every command except `train`; each module is named after the word that users type."""
