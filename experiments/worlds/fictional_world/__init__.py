"""An invented world: a corpus, questions about it, and an expert that answers them by searching."""
