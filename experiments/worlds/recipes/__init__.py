"""A world of recipes that a model must read or learn: a test of self-teachers with skills (SDAR)."""
