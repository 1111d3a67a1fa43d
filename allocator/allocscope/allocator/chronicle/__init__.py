"""What happened in an allocator, told event by event, and what it came to.

Its business: a recorded history as events (which block, from where, split, merged, given back, and whose doing that was), checked
against the snapshot's own blocks; the same of lines in the form that blog posts show; the choice among them; and the summary.

Not its business: where a history came from, how it looks on a screen, and what would happen under other settings (`simulator`).

    history.DeviceHistory ── shadow       (the blocks after each entry; layout: which lies where)
                          ── causes       (why memory was given back)
                          ── verification (what it came to against what the snapshot says)
"""
