"""An invented world: a corpus, questions about it, and an expert who answers them by searching."""
