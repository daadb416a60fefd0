"""The page under ``/``: ``source/`` is its TypeScript, ``bundle/`` what ``npm run build`` makes of it, which is served."""
