"""Everything between a decoded request and its encoded answer. See docs/structures.md."""
