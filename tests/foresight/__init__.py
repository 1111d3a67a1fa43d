"""How good the forecast is, over recorded runs: as they were and as they would have been seen otherwise; and its constants' fit.

`./dev foresight FOLDER` (python -m tests.foresight): FOLDER holds recordings (NAME.run.json, NAME.pickle.gz) and labels.json, which
says of each how it ended: family, oom, oom_us, foreseeable, doomed, cause.
"""
