"""Engine processes kept running: started, proven, watched, started again, drained."""
