"""Engine processes kept running: started, probed, watched, started again, drained."""
