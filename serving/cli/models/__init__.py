"""Models and engines of this machine: what is registered, cached and running, and the commands that change it."""
