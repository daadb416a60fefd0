"""Engine hosts that Ray starts: the leader orders them, and a process of its own, which alone imports Ray, obeys."""
