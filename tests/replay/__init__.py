"""How exact replays are: over recorded runs, as they were and cut, and over requests that PyTorch served under several settings.

`./dev replay FOLDER…` (python -m tests.replay): each FOLDER holds recordings (NAME.run.json, NAME.pickle.gz), or cases
(PROFILE-SETTINGS.json.gz), each of which says what PyTorch's own allocator did with its requests.
"""
