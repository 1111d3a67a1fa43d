"""The fleet's service: takes what daemons send, and answers questions about it.

Its business: ingest that acknowledges only what is stored, the queries over REST and gRPC,
`/metrics`, and the web page; `app` wires it together.

Not its business: NVML and processes (the daemon's), SQL (the storage's), judging (the alerts').
"""
