"""MindIE's dialect of chat."""
