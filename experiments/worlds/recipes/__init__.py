"""A world of recipes that must be read or learnt: where a self-teacher with skills (SDAR) has something to say."""
