"""Operating-system helpers without knowledge of models: processes, files, locks, memory, CPUs, logs."""
