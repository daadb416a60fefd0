"""Aliases that endpoints follow: looked up in the registry, rolled out, judged by canaries and rolled back."""
