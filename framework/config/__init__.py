"""The configuration: what there is to set, what is allowed, and what to say where it is wrong. No torch here."""
