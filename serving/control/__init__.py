"""The controller process: makes true what the store says is to be served. And what it shares with the workers."""
