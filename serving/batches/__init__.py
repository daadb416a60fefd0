"""Batches: files of requests that are answered in the background, kept in the metering store."""
