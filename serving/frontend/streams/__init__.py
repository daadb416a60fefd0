"""The bytes of streamed replies: when the first are sent, who writes the next, and what interrupts them."""
