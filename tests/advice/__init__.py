"""Advice is right: what it says of a run is what a replay of that run shows.

`python -m tests.advice FOLDER` holds it against every recording in a folder.
"""
