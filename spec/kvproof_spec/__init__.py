"""The specification of a paged KV-cache manager, in the standard library alone."""
