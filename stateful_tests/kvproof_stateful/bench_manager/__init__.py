"""`kvproof bench manager`: the plain manager against the genuine one, in one process."""
