"""The page under ``/``: ``npm run build`` makes ``bundle/``, which is served, of the TypeScript in ``source/``."""
